"""What a method declares: all that unitsphere must know of it before anything is built. No torch is needed for it.

A method from outside the package is a subclass of `Method`, named `package.module:Class` (examples/vicreg.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unitsphere.config.config import Config
from unitsphere.config.fields import Section
from unitsphere.config.layers import Patch
from unitsphere.config.sizing import Facts
from unitsphere.config.unused import UNUSED, Unused

if TYPE_CHECKING:
    from torch import nn

    from unitsphere.methods.learners.learner import Learner

__all__ = ["About", "Method"]


@dataclass(frozen=True)
class About:
    """What a method is, and how it differs from the defaults.

    title: a few words. paper: where it was published. needs: its views, its memory, its labels, in words.
    defaults: its settings. recipes: its settings on a kind of data, by the data's name. lengths: its settings for runs
    of so many epochs, by the data's name.
    """

    title: str
    paper: str
    needs: str
    defaults: Patch = field(default_factory=dict)
    recipes: Mapping[str, Patch] = field(default_factory=dict)
    lengths: Mapping[str, Mapping[int, Patch]] = field(default_factory=dict)


class Method:
    """A method. Subclasses override what is theirs; the named methods are instances that share a family.

    about: what it is. family: whose methods it combines with, as in jcl+eqco. Config: its fields, in `sections` for
    --help, with what must hold between them. unused: which fields have no effect when. has_embedding_head: its head is
    built from the fields of EmbeddingFields, so that it can be built again from a run's record.
    """

    about: About
    family: str = ""
    Config: type[Config] = Config
    sections: tuple[type[Section], ...] = ()
    unused: tuple[Unused, ...] = UNUSED
    has_embedding_head: bool = False

    def __init__(self, about: About | None = None) -> None:
        if about is not None:
            self.about = about

    def size(self, sizes: Patch, facts: Facts, given: Mapping[str, Any]) -> Patch:
        """Sizes of the method's own fields for data without a recipe; may change the common `sizes`.

        sizes: those of the common fields. given: the fields that the user named, with their values.
        """
        return {}

    def follow(self, values: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Patch]:
        """Settings that follow from others unless the user named them, by the words that say from what.

        values: all fields as they stand. named: the fields that the user named.
        """
        return {}

    def build(self, config: Any, backbone: nn.Module, features: int) -> Learner:
        """Build what trains. backbone: images to features (N, features). Called with the seed of the run set."""
        raise TypeError(f"{type(self).__name__} must define build(config, backbone, features).")
