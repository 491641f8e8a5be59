"""What does not fit is refused, by file and field."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import ContractMismatch, HeadError, StoreError
from pipeline.exchange.export import Format, export_head
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.registry import load_head
from tests.heads.conftest import CARD, CONFIG, VD, WEIGHTS, rewrite

OTHER_TOKENS = "do not name the same distinct target tokens"


def _drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("layers.0.hidden_norm.weight"), r"has no tensor midlayer\.hidden_norm\.weight"),
        (_drop("d2t"), "has no tensor d2t"),
        (lambda tensors: tensors.update({"fc.bias": torch.zeros(32)}), r"no place for: fc\.bias"),
        (
            lambda tensors: tensors["d2t"].add_(torch.arange(VD)),
            "d2t holds target ids where offsets belong",
        ),
        (lambda tensors: tensors["d2t"][3:4].fill_(10**6), OTHER_TOKENS),
        (lambda tensors: tensors["d2t"][1:2].sub_(3), OTHER_TOKENS),
        (lambda tensors: tensors["t2d"].logical_not_(), OTHER_TOKENS),
        (
            lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(7, 32)}),
            r"embed_tokens\.weight is \[7, 32\] where config\.json asks for",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object],
    message: str,
    exported: Callable[[Format], Path],
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
) -> None:
    directory = exported("speculators")
    rewrite(directory, change)
    with pytest.raises(HeadError, match=message):
        import_back(directory)


def test_weights_as_pickle_are_not_read(
    own: Path, import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]], tmp_path: Path
) -> None:
    """The error says how to convert them."""
    tensors = load_file(own / WEIGHTS)
    (own / WEIGHTS).unlink()
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous().T  # not contiguous
    torch.save(tensors, own / "pytorch_model.bin")
    (own / "optimizer.pt").touch()
    message = r"has no model\.safetensors, only weights as pickle \(pytorch_model\.bin\)"
    with pytest.raises(HeadError, match=message) as refused:
        import_back(own)
    assert refused.value.fix is not None
    command = shlex.split(refused.value.fix.partition(": ")[2])
    subprocess.run([sys.executable, *command[1:]], cwd=own, check=True)
    back, _ = import_back(own)
    assert torch.equal(back.fc.weight, tensors["fc.weight"].float())
    with pytest.raises(HeadError, match=r"has no config\.json"):
        import_back(tmp_path / "nowhere")


def test_a_head_of_another_target_is_refused(
    own: Path,
    tiny_target: Path,
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    tmp_path: Path,
) -> None:
    card = json.loads((own / CARD).read_text())
    card["contract"]["fingerprint"] = "another"
    (own / CARD).write_text(json.dumps(card))
    with pytest.raises(ContractMismatch, match="fingerprint"):
        import_back(own)
    out = tmp_path / "out"
    with pytest.raises(ContractMismatch, match="fingerprint"):
        export_head(str(own), format="speculators", out=str(out), target=str(tiny_target))
    assert not out.exists() and not (tmp_path / "back").exists()


def test_nothing_is_written_over(own: Path, tmp_path: Path) -> None:
    """`--out .` must not empty somebody's directory."""
    before = sorted(path.name for path in own.iterdir())
    with pytest.raises(StoreError, match="is not empty"):
        export_head(str(own), format="sglang", out=str(own))
    with pytest.raises(StoreError, match="is not empty"):
        export_head(str(own), format="sglang", out=str(tmp_path))
    with pytest.raises(StoreError, match="is a file"):
        export_head(str(own), format="sglang", out=str(own / CONFIG))
    assert sorted(path.name for path in own.iterdir()) == before


def test_a_head_of_the_other_dialect_is_sent_to_import(exported: Callable[[Format], Path]) -> None:
    directory = exported("speculators")
    with pytest.raises(HeadError, match=r"is in the dialect of speculators \(fix: eagle3 import "):
        load_head(directory)
