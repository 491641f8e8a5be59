"""The fixtures of synth: a configuration whose sources can be replaced."""

from tests.synth.conftest import make_config, prompts_file

__all__ = ["make_config", "prompts_file"]
