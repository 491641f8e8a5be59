"""A drafter without a head: the last token comes again."""

from __future__ import annotations

import torch

from pipeline.config import DrafterSection, TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafter import DrafterFactory, ReadTokens, TreeDrafter
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.target.open import Target


class EchoDrafter(TreeDrafter):
    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        pass

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        pass

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        depths = torch.arange(1, shape.steps + 1, device=batch.roots.device)
        tokens = batch.roots[:, None].expand(-1, shape.steps).contiguous()
        parents = (depths - 2).expand_as(tokens).contiguous()  # -1 is the root
        return Candidates(tokens, parents, -depths.float().expand_as(tokens).contiguous(), depths)


def echo(section: DrafterSection, model: DecoderModel, target: Target) -> DrafterFactory:
    return DrafterFactory(lambda trees: EchoDrafter(trees, model.vocabulary))
