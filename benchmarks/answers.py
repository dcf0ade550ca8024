"""Answer checking on the real data sets: right answers in many forms, wrong ones, and checks per second.

    python benchmarks/answers.py                  all rows of $OCTAVO_DATA (default ../shared/data)
    python benchmarks/answers.py --rows 200       a sample of each file

Writes benchmarks/results/answers.json, and what was judged otherwise than expected, with reasons, to
benchmarks/results/answers_listed.json. String equality is off: an answer is compared as a value, expression or word.
"""

import ast
import gzip
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

FILES = (
    "gsm8k/train.jsonl.gz", "gsm8k/test.jsonl", "math/train.jsonl.gz", "math/test.jsonl.gz", "math500/test.jsonl",
    "aime24/test.jsonl", "aime_1983_2023/train.jsonl", "amc22/test.jsonl", "olympiadbench/test.jsonl",
    "minerva/test.jsonl", "dapo_math_17k/train.jsonl.gz", "deepmath_5k/train.jsonl.gz",
    "deepscaler_math/train.jsonl.gz", "deepscaler_sub/train.jsonl",
)  # fmt: skip
DATA = Path(os.environ.get("OCTAVO_DATA", "../shared/data"))


def read_references(file: Path) -> list[tuple[str, str]]:
    """(id, reference) of every row; of several accepted answers, one a line."""
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["id"], reference_text(row["answer"])) for row in rows]


def reference_text(answer: str | list[str]) -> str:
    """GSM8K's behind ####, OlympiadBench's list, Minerva's list written as Python; else the text itself."""
    if isinstance(answer, str) and re.fullmatch(r"\[['\"].*['\"]\]", answer, flags=re.DOTALL):
        answer = ast.literal_eval(answer)
    if isinstance(answer, list):
        return "\n".join(" ".join(each.split()) for each in answer)
    return " ".join(answer.rpartition("####")[2].split())


def rewritten(reference: str) -> str:
    """The same answer, written otherwise, by rule and without looking at what it means."""
    text = re.sub(r"(?<![\\A-Za-z])\\frac(?![A-Za-z])", r"\\dfrac", reference.replace(r"\dfrac", r"\frac"))
    text = re.sub(r"\\left\s*|\\right\s*", "", text)
    text = (
        re.sub(r"\((?=[^()]*,[^()]*\)$)", r"\\left( ", re.sub(r"(?<=[^()])\)$", r" \\right)", text))
        if re.fullmatch(r"\([^()]*\)", text)
        else text
    )
    text = (
        re.sub(r"(?<![0-9.,])([0-9]{1,3})([0-9]{3})(?![0-9.,]|_)", r"\1{,}\2", text)
        if re.fullmatch(r"[0-9]{4,6}", text)
        else text
    )
    if re.fullmatch(r"-?[0-9]+\.[0-9]{1,4}", text):
        whole, _, fixed = text.partition(".")
        return f"\\frac{{{whole}{fixed}}}{{1{'0' * len(fixed)}}}"
    if re.fullmatch(r"-?[0-9]{1,3}", text):
        return f"x = {text}.0"
    text = re.sub(r"(?<![\\A-Za-z])\s*([+])\s*", r" \1 ", text)
    return text.replace(r"\cdot", r"\times").replace("^\\circ", "^{\\circ}").replace("\\text{", "\\mbox{")


def forms(reference: str) -> dict[str, str]:
    """Completions that give the reference, by the name of the form."""
    first = reference.splitlines()[0] if reference else ""
    bare = re.sub(r"(?<!\\)\$", "", first)
    return {
        "prose": f"We add both sides and simplify.\nSo the answer is ${bare}$.",
        "boxed": f"Hence 3 of 7 cases remain and we get $\\boxed{{{bare}}}$ as claimed.",
        "hashes": f"We halve 48.\n#### {first}",
        "rewritten": f"Thus \\boxed{{{rewritten(bare)}}}.",
    }


def cases(files: tuple[str, ...] = FILES, rows: int | None = None) -> Iterator[tuple[str, str, str, str, str]]:
    """(file, form, id, completion, reference), right answers."""
    for name in files:
        references = read_references(DATA / name)
        for identity, reference in (
            references if rows is None else random.Random(name).sample(references, min(rows, len(references)))
        ):
            for form, completion in forms(reference).items():
                yield name, form, identity, completion, reference
