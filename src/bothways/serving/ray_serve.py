"""The server as a deployment of Ray Serve: replicas on the machines of a Ray cluster.

    from ray import serve
    from bothways.serving.ray_serve import deployment

    serve.run(deployment({"films": "runs/sst"}, replicas=4, cores=2), route_prefix="/")

Each replica is a whole server, with the routes, limits and batches of `bothways serve`; Ray's proxy
shares requests among them. Ray limits the requests that a replica holds; its own queue is limited
in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bothways.core.errors import optional
from bothways.prediction.predictor import open_task
from bothways.prediction.prepared_model import PredictPrecision
from bothways.serving.app import App, app
from bothways.serving.limits import DEFAULT_LIMITS, Limits

REQUESTS = 1000
"""Requests that a replica holds at once: many, so that they share batches."""


def deployment(
    models: Mapping[str, str],
    *,
    replicas: int = 1,
    cores: int = 1,
    gpus: float = 0,
    precision: PredictPrecision = "fp32",
    limits: Limits = DEFAULT_LIMITS,
) -> Any:
    """Return an application for `serve.run`.

    Keys and host names are not checked: access to the cluster's proxy decides who may ask.

    Args:
        models: folders, of runs or models, or Hub ids, by the name to serve; every machine of the
            cluster must be able to read them.
        replicas: number of servers.
        cores, gpus: of each.

    Raises:
        ResourceError: Ray Serve is not installed.
    """
    with optional("ray", "a deployment of Ray Serve"):
        from ray import serve

    def build() -> App:
        """Open the models on a replica."""
        import torch

        torch.set_num_threads(cores)
        opened = {
            name: open_task(folder, precision=precision, batch_invariant=True)
            for name, folder in models.items()
        }
        return app(opened, limits=limits)

    server = serve.deployment(
        serve.ingress(build)(),
        name="bothways",
        num_replicas=replicas,
        max_ongoing_requests=REQUESTS,
        ray_actor_options={"num_cpus": cores, "num_gpus": gpus},
    )
    return server.bind()
