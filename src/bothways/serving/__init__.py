"""Serving over HTTP: predictors as an ASGI app, and a server for it. May import `prediction`.

    from bothways.serving import app

    application = app({"sst": "runs/sst"})

`app` needs no web framework; it can be run by any ASGI server and mounted in other apps.
"""

from bothways.serving.app import app
from bothways.serving.errors import Limits

__all__ = ["Limits", "app"]
