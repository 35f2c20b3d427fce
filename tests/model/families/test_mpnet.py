"""MPNet's buckets of distances against transformers, at every distance; settings that it cannot have."""

import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from bothways.core.errors import ConfigError, FolderError
from bothways.model.embedding import bucket_of
from bothways.model.families.mpnet import MPNET
from bothways.model.positions import DistanceBias


def test_buckets_of_all_distances_equal_transformers():
    distances = torch.arange(-600, 601)
    reference = MPNetEncoder.relative_position_bucket(-distances, num_buckets=32)
    torch.testing.assert_close(bucket_of(DistanceBias(), distances), reference, rtol=0, atol=0)


def test_buckets_of_example():
    buckets = bucket_of(DistanceBias(8, 8), torch.arange(-4, 6)).tolist()
    assert buckets == [7, 6, 6, 5, 0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pad_token_id": 0}, "pad_token_id must be 1, from which positions count, not 0"),
        ({"relative_attention_num_buckets": 64}, "must be 32, not 64"),
    ],
)
def test_settings_that_transformers_does_not_obey_are_refused(settings, message):
    with pytest.raises(FolderError, match=message):
        MPNET.config_rules.read(settings, "config.json")


@pytest.mark.parametrize(("buckets", "distance"), [(2, 128), (6, 128), (32, 8)])
def test_impossible_buckets_are_refused(buckets, distance):
    with pytest.raises(ConfigError) as caught:
        DistanceBias(buckets, distance)
    assert str(caught.value.where).startswith("encoder.position.bias.")
