import pytest

from octavo.tasks.rewards import (
    THINK_THEN_ANSWER,
    FormatReward,
    ModelReward,
    PythonReward,
    RewardConfig,
    format_score,
    load_function,
    python_score,
)


@pytest.fixture
def rewards_file(tmp_path):
    (tmp_path / "beside.py").write_text("BONUS = 10\n")
    path = tmp_path / "rewards.py"
    path.write_text(
        "from beside import BONUS\n"
        "def length(prompt, completion, answer): return len(prompt) + BONUS * len(completion) + 100 * len(answer)\n"
        "import asyncio\nasync def later(prompt, completion, answer):\n    await asyncio.sleep(0)\n    return True\n"
        "def words(prompt, completion, answer): return 'much'\n"
        "def infinite(prompt, completion, answer): return float('inf')\n"
        "def nothing(prompt, completion, answer): pass\n"
        "NUMBER = 3\n"
    )
    return path


def test_a_function_of_a_file_scores(rewards_file):
    assert python_score(f"{rewards_file}:length", "a", "bc", "def") == 1 + 20 + 300
    assert python_score(f"{rewards_file}:later", "", "", "") == 1.0


@pytest.mark.parametrize(
    "name, message",
    [
        ("words", "returned 'much'; wants a number"),
        ("infinite", "returned inf; wants a finite number"),
        ("nothing", "returned None; wants a number"),
        ("absent", "has no function absent"),
        ("NUMBER", "has no function NUMBER"),
    ],
)
def test_what_is_no_score_says_so(rewards_file, name, message):
    with pytest.raises(ValueError, match=message):
        python_score(f"{rewards_file}:{name}", "", "", "")


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        load_function(f"{tmp_path}/none.py:score")


@pytest.mark.parametrize(
    "text, score",
    [
        ("<think>2 and 2</think>4", 1.0),
        (" <think>\n2\n</think>\n\nIt is 4.\n", 1.0),
        ("<think>2 and 2</think>", 0.0),
        ("<think>2 and 2</think>\n \n", 0.0),
        ("<think>2 and 2", 0.0),
        ("2 and 2</think>4", 0.0),
        ("<think>a</think>4<think>b</think>5", 0.0),
        ("<think>a<think>b</think>5", 0.0),
        ("4", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_is_thoughts_and_then_an_answer(text, score):
    assert format_score(THINK_THEN_ANSWER, text) == score


def test_a_pattern_must_match_the_whole_completion():
    assert [format_score("a.b", text) for text in ("a\nb", "axb", "axbc", "xaxb")] == [1.0, 1.0, 0.0, 0.0]


def test_weights_are_by_part():
    config = RewardConfig(format=FormatReward(weight=0.2), python=PythonReward(function="f.py:score", weight=-1.0))
    assert config.weights() == {"check": 1.0, "format": 0.2, "python": -1.0}
    assert RewardConfig().weights() == {"check": 1.0}
    assert RewardConfig(check_weight=0.0, model=ModelReward(path="m")).weights() == {"check": 0.0, "model": 1.0}


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: RewardConfig(check_weight=0.0), "check_weight=0 leaves nothing"),
        (lambda: RewardConfig(check_weight=float("nan")), "check_weight is finite"),
        (lambda: FormatReward(pattern="("), "no regular expression"),
        (lambda: FormatReward(weight=0.0), "weight is finite and not 0"),
        (lambda: PythonReward(function="score"), "file.py:name or package.module:name"),
        (lambda: PythonReward(function="f.py:"), "file.py:name or package.module:name"),
        (lambda: ModelReward(path="m", batch_size=0), "batch_size must be at least 1"),
    ],
)
def test_bad_fields_are_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()
