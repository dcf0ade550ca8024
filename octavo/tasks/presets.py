"""Published data sets by name: where they are, what their rows look like, how an answer is checked.

A preset reads its folder in $OCTAVO_DATA if that is there, else the hub. Rows may be as published, or already have
`problem` and `answer`, with `tests` and `test_setup` for code.
"""

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from octavo.tasks.rows import BadRow, take

CheckName = Literal["math", "exact", "multiple_choice", "code"]
PresetName = Literal[
    "gsm8k",
    "math",
    "gsm8k_math",
    "math500",
    "deepmath_103k",
    "deepmath_5k",
    "deepscaler",
    "deepscaler_math",
    "deepscaler_sub",
    "dapo_math_17k",
    "eurus2_math",
    "eurus2_code",
    "mbpp",
    "humaneval",
    "aime24",
    "aime25",
    "aime_1983_2023",
    "amc22",
    "amc23",
    "minerva",
    "olympiadbench",
    "gaokao2023",
]
MIXES: dict[str, tuple[PresetName, ...]] = {"gsm8k_math": ("gsm8k", "math")}
"""Presets that are several others, each problem as often as in its own set."""

NUMBER = "\nReason step by step, and put the final answer, a number, in \\boxed{} or after ####."
BOXED = "\nReason step by step, and put the final answer in \\boxed{}."
INSTRUCTIONS: dict[CheckName, str] = {
    "math": BOXED,
    "exact": BOXED,
    "multiple_choice": "\nReason step by step, and put the letter of the right choice in \\boxed{}.",
    "code": "\nWrite the whole Python program, imports too, in one block between ```python and ```.",
}
"""What the policy is told where neither the config nor the preset says."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One published data set."""

    folder: str
    """In $OCTAVO_DATA, with files train and test."""
    hub: str | None = None
    """Data set on the hub; None where it was never published by itself."""
    hub_config: str | None = None
    """Its configuration there."""
    train: str | None = None
    """Split to train on as published; None where the set is a benchmark."""
    test: str | None = None
    """Split to measure on as published; None where the set has none."""
    read: Callable[[dict], dict | None] = dict
    """A published row -> `problem`, `answer` and, where there are any, `id`, `solution`, `tests`, `appendix`,
    `accepted`; None for a row that is not of this preset."""
    check: CheckName = "math"
    """How a completion is checked."""
    instruction: str | None = None
    """Appended to each problem; None is what the check asks for."""
    repeats: bool = False
    """Whether the published rows repeat problems, ids and all, of which only the first counts."""
    max_bad_rows: int = 0
    """Rows that are known to have no answer."""
    licence: str
    """Of the problems, as their source states it."""


def _or_plain(read: Callable[[dict], dict | None]) -> Callable[[dict], dict | None]:
    """`read`, but a row that has `problem` and `answer` already stays as it is."""
    return lambda row: row if "problem" in row and "answer" in row else read(row)


def _columns(**paths: str) -> Callable[[dict], dict | None]:
    """Rows whose columns have other names."""
    return _or_plain(lambda row: {name: take(row, path) for name, path in paths.items()})


def _gsm8k(row: dict) -> dict:
    answer, solution = take(row, "answer"), row.get("solution", "")
    if isinstance(answer, str) and "####" in answer:
        solution, _, answer = answer.rpartition("####")
    problem = row["problem"] if "problem" in row else take(row, "question")
    return {**row, "problem": problem, "answer": answer, "solution": solution}


@_or_plain
def _math(row: dict) -> dict:
    solution = str(take(row, "solution"))
    return {"problem": take(row, "problem"), "answer": last_box(solution), "solution": solution}


def last_box(text: str) -> str:
    """What is in the last \\boxed{} or \\fbox{} of a solution, or after `\\boxed `; "" if there is none."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return ""
    inner = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not inner.startswith("{"):
        return inner.partition("$")[0].strip()
    depth = 0
    for end, character in enumerate(inner):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return inner[1:end].strip()
    return ""


def _accepted(row: dict) -> dict:
    """Minerva's answers: one text, or a list of equally right ones as Python writes it."""
    answer = take(row, "answer")
    if isinstance(answer, str) and answer.startswith("["):
        try:
            answer = ast.literal_eval(answer)
        except (ValueError, SyntaxError) as error:
            raise BadRow(f"'answer' is no list: {answer!r:.60}") from error
    answers = answer if isinstance(answer, list) else [answer]
    if not answers:
        raise BadRow("'answer' is an empty list")
    problem = row["problem"] if "problem" in row else take(row, "question")
    return {**row, "problem": problem, "answer": answers[0], "accepted": answers[1:]}


DAPO_HEAD = "Solve the following math problem step by step."
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'
EURUS_MATH_TAIL = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"
EURUS_CODE_TAIL = "\n\nWrite Python code to solve the problem."


@_or_plain
def _dapo(row: dict) -> dict:
    text = str(take(row, "prompt.0.content"))
    if text.startswith(DAPO_HEAD):
        text = text.partition("\n\n")[2]
    answer, index = take(row, "reward_model.ground_truth"), take(row, "extra_info.index")
    return {"id": index, "problem": text.removesuffix(DAPO_TAIL), "answer": answer}


def _eurus2(ability: str, tail: str) -> Callable[[dict], dict | None]:
    """PRIME-RL's format: a system message with instructions of its own, then the problem, then how to answer."""

    def read(row: dict) -> dict | None:
        if take(row, "ability") != ability:
            return None
        problem = str(take(row, "prompt.-1.content")).partition(tail)[0].strip()
        truth = take(row, "reward_model.ground_truth")
        return {"problem": problem, **({"answer": truth} if ability == "math" else _io_tests(truth))}

    return read


def _io_tests(truth: Any) -> dict:
    """Test cases of APPS, TACO, Codeforces and CodeContests: calls of `fn_name`, or what a program reads and prints."""
    try:
        cases = json.loads(truth) if isinstance(truth, str) else truth
        inputs, outputs, name = list(cases["inputs"]), list(cases["outputs"]), cases.get("fn_name")
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise BadRow(f"'reward_model.ground_truth' wants JSON with inputs and outputs, got {truth!r:.60}") from error
    if len(inputs) != len(outputs) or not inputs:
        raise BadRow(f"wants as many outputs as inputs, at least one; got {len(inputs)} and {len(outputs)}")
    pairs = zip(inputs, outputs, strict=True)
    make = _call_test if name else _stdin_test
    return {"answer": "", "tests": [make(given, wanted, name) for given, wanted in pairs]}


def _call_test(arguments: Any, wanted: Any, name: str) -> str:
    """A call, of the function or of LeetCode's class. Some sets have the result in a list of its own."""
    return (
        f"_call = getattr(globals()['Solution'](), {name!r}) if 'Solution' in globals() else {name}\n"
        f"_got, _wanted = _call(*{arguments!r}), {wanted!r}\n"
        f"_got = list(_got) if isinstance(_got, tuple) else _got\n"
        f"assert _got == _wanted or (isinstance(_wanted, list) and _wanted and _got == _wanted[0])"
    )


def _stdin_test(given: Any, wanted: Any, name: None) -> str:
    """What a program reads and must print, as JSON; either may stand as a list of lines."""
    stdin, stdout = ("\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (given, wanted))
    return json.dumps({"stdin": stdin, "stdout": stdout})


def _mbpp(row: dict) -> dict:
    if "test_list" in row:
        row = {
            "problem": take(row, "text"),
            "answer": take(row, "code"),
            "tests": take(row, "test_list"),
            "test_setup": row.get("test_setup_code") or "",
            "id": f"mbpp/{take(row, 'task_id')}",
        }
    tests = take(row, "tests")
    tests = [tests] if isinstance(tests, str) else [str(test) for test in tests]
    shown = "\n".join(["\nYour program should pass these tests:", *tests])  # they alone say what the function is called
    setup = row.get("test_setup") or ""
    return {**row, "appendix": shown, "tests": [f"{setup}\n{test}".strip() for test in tests]}


def _humaneval(row: dict) -> dict:
    if "canonical_solution" in row:
        row = {
            "problem": take(row, "prompt"),
            "answer": take(row, "canonical_solution"),
            "tests": take(row, "test"),
            "entry_point": take(row, "entry_point"),
            "id": take(row, "task_id"),
        }
    problem, answer = take(row, "problem"), take(row, "answer")
    test = f"{take(row, 'tests')}\n\ncheck({take(row, 'entry_point')})"
    return {**row, "answer": f"{problem}{answer}", "tests": [test]}


def _year(year: str) -> Callable[[dict], dict | None]:
    """AMC problems of one year, where the set has several and says so in its `url`."""
    return lambda row: row if year in row.get("url", year) else None


PRESETS: dict[str, Preset] = {
    "gsm8k": Preset(
        folder="gsm8k",
        hub="openai/gsm8k",
        hub_config="main",
        train="train",
        test="test",
        read=_gsm8k,
        instruction=NUMBER,
        licence="MIT",
    ),
    "math": Preset(
        folder="math",
        hub="DigitalLearningGmbH/MATH-lighteval",
        train="train",
        test="test",
        read=_math,
        max_bad_rows=2,
        licence="MIT",
    ),
    "math500": Preset(folder="math500", hub="HuggingFaceH4/MATH-500", test="test", licence="MIT"),
    "deepmath_103k": Preset(
        folder="deepmath_103k",
        hub="zwhe99/DeepMath-103K",
        train="train",
        read=_columns(problem="question", answer="final_answer"),
        licence="MIT",
    ),
    "deepmath_5k": Preset(folder="deepmath_5k", train="train", licence="MIT"),
    "deepscaler": Preset(
        folder="deepscaler",
        hub="agentica-org/DeepScaleR-Preview-Dataset",
        train="train",
        max_bad_rows=6,
        licence="MIT",
    ),
    "deepscaler_math": Preset(folder="deepscaler_math", train="train", max_bad_rows=2, licence="MIT"),
    "deepscaler_sub": Preset(folder="deepscaler_sub", train="train", max_bad_rows=1, licence="MIT"),
    "dapo_math_17k": Preset(
        folder="dapo_math_17k",
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        train="train",
        read=_dapo,
        repeats=True,
        licence="Apache-2.0",
    ),
    "eurus2_math": Preset(
        folder="eurus2",
        hub="PRIME-RL/Eurus-2-RL-Data",
        train="train",
        test="validation",
        read=_eurus2("math", EURUS_MATH_TAIL),
        licence="MIT",
    ),
    "eurus2_code": Preset(
        folder="eurus2",
        hub="PRIME-RL/Eurus-2-RL-Data",
        train="train",
        test="validation",
        read=_eurus2("code", EURUS_CODE_TAIL),
        check="code",
        licence="MIT",
    ),
    "mbpp": Preset(
        folder="mbpp",
        hub="google-research-datasets/mbpp",
        hub_config="full",
        train="train",
        test="test",
        read=_mbpp,
        check="code",
        licence="CC BY 4.0",
    ),
    "humaneval": Preset(
        folder="humaneval",
        hub="openai/openai_humaneval",
        test="test",
        read=_humaneval,
        check="code",
        licence="MIT",
    ),
    "aime24": Preset(folder="aime24", hub="HuggingFaceH4/aime_2024", test="train", licence="problems (c) MAA"),
    "aime25": Preset(folder="aime25", hub="MathArena/aime_2025", test="train", licence="CC BY-NC-SA 4.0"),
    "aime_1983_2023": Preset(folder="aime_1983_2023", train="train", licence="problems (c) MAA"),
    "amc22": Preset(
        folder="amc22",
        hub="AI-MO/aimo-validation-amc",
        test="train",
        read=_year("2022"),
        licence="problems (c) MAA",
    ),
    "amc23": Preset(
        folder="amc23",
        hub="AI-MO/aimo-validation-amc",
        test="train",
        read=_year("2023"),
        licence="problems (c) MAA",
    ),
    "minerva": Preset(
        folder="minerva",
        hub="math-ai/minervamath",
        test="test",
        read=_accepted,
        licence="CC BY-NC-SA 4.0",
    ),
    "olympiadbench": Preset(
        folder="olympiadbench",
        hub="Hothan/OlympiadBench",
        hub_config="OE_TO_maths_en_COMP",
        test="train",
        read=_columns(problem="question", answer="final_answer"),
        licence="MIT",
    ),
    "gaokao2023": Preset(
        folder="gaokao2023",
        hub="MARIO-Math-Reasoning/Gaokao2023-Math-En",
        test="train",
        read=_columns(problem="question", answer="answer"),
        licence="MIT",
    ),
}
