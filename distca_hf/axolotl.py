"""Axolotl's plugin, found by its entry point: a section `distca:` of a YAML file balances the training.

    distca: {}                    # or settings of DistCAPlugin, by their names

Without that section nothing changes. Packs and batches stay axolotl's, unless `tokens_per_rank` is set.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

import distca_hf
from distca_hf.config import DistCAConfig, config_of
from distca_hf.settings import check_mapping


SECTION = "distca"


class DistCAArguments(BaseModel):
    """The section of axolotl's configuration. `true` means a section without settings; null and `false` mean none."""

    distca: dict[str, Any] | None = None

    @field_validator(SECTION, mode="before")
    @classmethod
    def check(cls, section: object) -> object:
        """Checks names and values. Raises ConfigError if a name is not a setting, or a value is wrong; axolotl shows
        the message."""
        if section is None or section is False:
            return None
        settings = {} if section is True else section
        config_of(check_mapping(DistCAConfig, settings, SECTION))
        return settings


class BalancedTraining(BasePlugin):
    """Attaches the Trainer that axolotl creates."""

    def get_input_args(self) -> str:
        """Returns the name of the class of the section."""
        return f"{__name__}.{DistCAArguments.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Attaches a Trainer, if the configuration has the section. Raises the errors of `DistCAPlugin.attach`."""
        if cfg.distca is not None:
            config = config_of(check_mapping(DistCAConfig, cfg.distca, SECTION))
            distca_hf.DistCAPlugin(**vars(config)).attach(trainer)
