"""The block drafter (DFlash, arXiv:2602.06036)."""
