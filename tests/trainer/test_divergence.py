"""What a diagnosis writes."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo.trainer.divergence import FOLDER, Diverged, StepRecord, save_diagnosis


@dataclass
class Two:
    old_logprobs: Tensor
    shadow_old_logprobs: Tensor | None


def test_a_batch_whose_tensors_share_memory_is_written(tmp_path):
    whole = torch.arange(8.0)
    batch = SimpleNamespace(microbatches=[Two(whole[:5], whole[2:]), Two(whole[::2], None)])
    raised = save_diagnosis(
        tmp_path, Diverged("update", {"loss": torch.tensor(torch.nan)}), StepRecord(step=3, mini_batch=batch), {}
    )
    assert "The batch and the diagnosis are in" in str(raised)
    found = load_file(tmp_path / FOLDER / "batch.safetensors")
    assert {name: x.tolist() for name, x in found.items()} == {
        "microbatch_0.old_logprobs": [0.0, 1.0, 2.0, 3.0, 4.0],
        "microbatch_0.shadow_old_logprobs": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "microbatch_1.old_logprobs": [0.0, 2.0, 4.0, 6.0],
    }
