"""Problems that are both trained on and measured on, which makes a measurement worthless."""

from collections.abc import Iterable

from octavo.tasks.problem import Problem, same_problem_key


def split_overlap(train: Iterable[Problem], test: Iterable[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Problems of two sets that are stated with the same letters and digits; reworded ones stay unseen.

    Returns:
        Those of `train` that are in `test`, and those of `test` that are in `train`, in their order.
    """
    train, test = list(train), list(test)
    shared = {same_problem_key(problem) for problem in train} & {same_problem_key(problem) for problem in test}
    inside = [[problem for problem in side if same_problem_key(problem) in shared] for side in (train, test)]
    return inside[0], inside[1]
