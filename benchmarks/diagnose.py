"""What `octavo diagnose model` finds on a model: noise, over-clipping, agreement, and how long it takes.

    python benchmarks/diagnose.py /path/to/SmolLM2-135M-Instruct --name smollm2

writes benchmarks/results/diagnose_NAME.json.
"""

import argparse
import time
from pathlib import Path

from octavo.bench.results import Results, Row
from octavo.diagnose.diagnosis_page import FIGURES, show
from octavo.diagnose.model import ModelDiagnosis, diagnose_model
from octavo.rl.observatory_modules import first_difference
from octavo.trainer.metrics import Display

UNITS = {"share": "share", "count": "tokens", "number": ""}
NATS = ("log_ratio_std", "logprob_diff", "policy/entropy")


def main() -> None:
    """Diagnose, show, and leave every figure in the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="Hugging Face folder or hub id")
    parser.add_argument("--name", required=True, help="of the result file")
    parser.add_argument("--prompts", type=Path, default=Path("examples/prompts.txt"))
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--kv-cache", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--dither", action="store_true", help="as octavo diagnose model --dither")
    options = parser.parse_args()
    settings = ModelDiagnosis(
        model=options.model,
        prompts=options.prompts,
        num_prompts=options.num_prompts,
        max_tokens=options.max_tokens,
        lr=options.lr,
        kv_cache=options.kv_cache,
        dither=options.dither,
    )
    started = time.process_time()
    diagnosis = diagnose_model(settings, Display())
    seconds = time.process_time() - started
    show(diagnosis)
    size = f"--num-prompts {options.num_prompts} --max-tokens {options.max_tokens} --lr {options.lr:g}"
    size += f" --kv-cache {options.kv_cache}" + " --dither" * options.dither
    command = f"python benchmarks/diagnose.py {Path(options.model).name} --name {options.name} {size}"
    results = Results(f"diagnose_{options.name}", command)
    case = f"diagnose/{options.name}"
    for name, metrics in diagnosis.columns.items():
        for label, key, kind in FIGURES:
            if metrics.get(key) is not None:
                unit = "nats" if any(part in key for part in NATS) and kind == "number" else UNITS[kind]
                row = Row(case=f"{case}/{name}", metric=key, value=metrics[key], unit=unit, better="lower", note=label)
                results.add(row)
    for name, differences in diagnosis.modules.items():
        first = first_difference(differences)
        count = sum(difference.differing_share > 0.0 for difference in differences)
        note = f"of {len(differences)}; first: {'none' if first is None else first.module}"
        results.add(Row(case=f"{case}/{name}", metric="operations_differing", value=count, unit="", note=note))
    results.add(Row(case=case, metric="cpu_time", value=seconds, unit="s", better="lower"))


if __name__ == "__main__":
    main()
