"""`python -m octavo.plugins.verl`: whether verl, as it is installed here, has octavo's losses and engine."""

import sys

from octavo.plugins.verl.status import missing


def main() -> int:
    """Print one line; 0 where all is registered, else 2."""
    if problem := missing():
        print(f"octavo: {problem}", file=sys.stderr)
        return 2
    print("verl has octavo's policy losses and the engine of actor.strategy=octavo")
    return 0


if __name__ == "__main__":
    sys.exit(main())
