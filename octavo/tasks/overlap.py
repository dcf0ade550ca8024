"""Problems that are both trained on and measured on, which makes a measurement worthless."""

from collections.abc import Sequence

from octavo.tasks.problem import Problem, same_problem_key


def split_overlap(train: Sequence[Problem], test: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Problems of two sets that are stated with the same letters and digits; reworded ones stay unseen.

    Returns:
        Those of `train` that are in `test`, and those of `test` that are in `train`, in their order.
    """
    train_keys, test_keys = ([same_problem_key(problem) for problem in problems] for problems in (train, test))
    shared = set(train_keys) & set(test_keys)
    in_train = [problem for problem, key in zip(train, train_keys, strict=True) if key in shared]
    in_test = [problem for problem, key in zip(test, test_keys, strict=True) if key in shared]
    return in_train, in_test
