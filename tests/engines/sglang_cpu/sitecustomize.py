"""Read by each of SGLang's processes as it starts: it imports torchvision, of which PyPI's wheel is
built for CUDA, and whose own operations are then missing. Nothing that serves text calls them."""

import torch

for _name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{_name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
    )
