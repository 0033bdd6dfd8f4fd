"""What plug-ins of other packages may add, and how: the public face of the registries.

A package names a function in its entry points (group `serve_spec.plugins`):

    [project.entry-points."serve_spec.plugins"]
    my_package = "my_package.plugin:register"

The function takes no arguments and calls some of the functions below, each with the place of what
it adds, `package.module:attribute` (`path` of a `DraftMethod`). Every process calls it once, before
it reads a configuration; so it imports nothing heavy, and nothing at a place is imported before a
checkpoint needs it.
"""

from serve_spec.config.drafts import DraftMethod as DraftMethod
from serve_spec.config.drafts import register_draft as register_draft
from serve_spec.core.registry import PLUGIN_GROUP as PLUGIN_GROUP
from serve_spec.layers.formats.registry import register_format as register_format
from serve_spec.models.registry import register_target as register_target
