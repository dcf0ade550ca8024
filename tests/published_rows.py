"""Rows as data sets publish them, invented for the tests, and what a preset must make of each."""

import json

EURUS_SYSTEM = {"role": "system", "content": "\nWhen tackling complex reasoning tasks, you have access to ..."}


def eurus(ability: str, problem: str, tail: str, truth: str) -> dict:
    """A row of PRIME-RL/Eurus-2-RL-Data."""
    return {
        "data_source": "numina_olympiads" if ability == "math" else "taco",
        "prompt": [EURUS_SYSTEM, {"role": "user", "content": problem + tail}],
        "ability": ability,
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": 0, "split": "dummy"},
    }


def dapo(problem: str, answer: str, index: str) -> dict:
    """A row of BytedTsinghua-SIA/DAPO-Math-17k."""
    head = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    )
    tail = '\n\nRemember to put your answer on its own line after "Answer:".'
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": head + problem + tail, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


MATH_TAIL = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"
CODE_TAIL = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]})
STDIN = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
EURUS = [
    eurus("math", "Find $x$ if $2x = 6$.", MATH_TAIL, "3"),
    eurus("code", "Add two numbers.", CODE_TAIL, CALLS),
    eurus("code", "Read two numbers and print their sum.", CODE_TAIL, STDIN),
]

PUBLISHED: dict[str, tuple[str, list[dict], list[tuple[str, str]]]] = {
    "gsm8k": (
        "train",
        [{"question": "What is 35,000 x 2?", "answer": "It is <<35000*2=70000>>70,000.\n#### 70,000"}],
        [("What is 35,000 x 2?", "70,000")],
    ),
    "math": (
        "train",
        [
            {
                "problem": "Half of one?",
                "level": "Level 1",
                "type": "Algebra",
                "solution": "Not \\boxed{2} but $\\boxed{\\frac{1}{2}}$.",
            },
            {"problem": "And a third?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed 3$."},
        ],
        [("Half of one?", "\\frac{1}{2}"), ("And a third?", "3")],
    ),
    "math500": (
        "test",
        [
            {
                "problem": "One?",
                "solution": "$\\boxed{1}$",
                "answer": "1",
                "subject": "Algebra",
                "level": 1,
                "unique_id": "test/algebra/1.json",
            }
        ],
        [("One?", "1")],
    ),
    "deepmath_103k": (
        "train",
        [
            {
                "question": "Evaluate the limit.",
                "final_answer": "\\infty",
                "difficulty": 5.0,
                "topic": "Mathematics -> Calculus -> Limits",
                "r1_solution_1": "So",
                "r1_solution_2": "Or so",
                "r1_solution_3": "Hm",
            }
        ],
        [("Evaluate the limit.", "\\infty")],
    ),
    "deepscaler": (
        "train",
        [
            {"problem": "Sum?", "answer": "26", "solution": "1 and 25"},
            {"problem": "No answer", "answer": "", "solution": ""},
        ],
        [("Sum?", "26")],
    ),
    "dapo_math_17k": (
        "train",
        [dapo("Find $a$.\n\nIt is whole.", "34", "u-1"), dapo("Find $b$.", "-2", "u-2")] * 3,
        [("Find $a$.\n\nIt is whole.", "34"), ("Find $b$.", "-2")],
    ),
    "eurus2_math": ("validation", EURUS, [("Find $x$ if $2x = 6$.", "3")]),
    "eurus2_code": ("validation", EURUS, [("Add two numbers.", ""), ("Read two numbers and print their sum.", "")]),
    "mbpp": (
        "train",
        [
            {
                "task_id": 601,
                "text": "Write a function to add.",
                "code": "def add(a, b):\n    return a + b",
                "test_list": ["assert add(1, 2) == 3", "assert add(0, X) == 5"],
                "test_setup_code": "X = 5",
                "challenge_test_list": [],
            }
        ],
        [("Write a function to add.", "def add(a, b):\n    return a + b")],
    ),
    "humaneval": (
        "test",
        [
            {
                "task_id": "HumanEval/0",
                "prompt": "def one():\n    '''One.'''\n",
                "canonical_solution": "    return 1\n",
                "test": "def check(candidate):\n    assert candidate() == 1\n",
                "entry_point": "one",
            }
        ],
        [("def one():\n    '''One.'''\n", "def one():\n    '''One.'''\n    return 1")],
    ),
    "aime24": (
        "train",
        [
            {
                "id": 60,
                "problem": "Find it.",
                "solution": "So",
                "answer": "204",
                "url": "https://x/2024_AIME_I",
                "year": "2024",
            }
        ],
        [("Find it.", "204")],
    ),
    "aime25": (
        "train",
        [{"problem_idx": 1, "problem": "Find the sum of all bases.", "answer": 70, "problem_type": ["Number Theory"]}],
        [("Find the sum of all bases.", "70")],
    ),
    "amc22": (
        "train",
        [
            {"id": 0, "problem": "What is m+n?", "answer": 142.0, "url": "https://x/2022_AMC_12A_Problems/Problem_1"},
            {"id": 43, "problem": "How far?", "answer": 27.0, "url": "https://x/2023_AMC_12A_Problems/Problem_1"},
        ],
        [("What is m+n?", "142")],
    ),
    "amc23": (
        "train",
        [
            {"id": 0, "problem": "What is m+n?", "answer": 142.0, "url": "https://x/2022_AMC_12A_Problems/Problem_1"},
            {"id": 43, "problem": "How far?", "answer": 27.5, "url": "https://x/2023_AMC_12A_Problems/Problem_1"},
        ],
        [("How far?", "27.5")],
    ),
    "minerva": ("test", [{"question": "How bright?", "answer": "7.6e33"}], [("How bright?", "7.6e33")]),
    "olympiadbench": (
        "train",
        [
            {
                "id": 1606,
                "question": "How many moves?",
                "solution": ["So."],
                "final_answer": ["2", "$3$"],
                "is_multiple_answer": True,
                "unit": None,
                "answer_type": "Numerical",
            }
        ],
        [("How many moves?", "2, $3$")],
    ),
    "gaokao2023": ("train", [{"question": "Solve.", "answer": "$1$"}], [("Solve.", "$1$")]),
}
"""Preset -> (published split, rows, text and answer of the problems)."""
