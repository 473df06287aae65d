"""What the docs site changes in a page: the docstrings' Sphinx roles become plain code."""

import re
from typing import Any

ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):(?=<code>)")


def on_page_content(html: str, **_: Any) -> str:
    """``:func:`name``` shows as ``name``."""
    return ROLE.sub("", html)
