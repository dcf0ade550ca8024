"""A run that does not fit its device: what is said, and whether following it helps."""

import re

import pytest
import torch
from test_memory import BASE, QWEN3_8B, SMOLLM2
from training_runs import TINY_MODEL, run, tiny_config

from octavo.trainer import memory_advice, train
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import apply_overrides, from_dict
from octavo.trainer.memory import GIB, plan_memory
from octavo.trainer.memory_advice import changes_that_fit, check_room, options, with_changes
