"""Metrics of nodes, summed over the cluster."""

import urllib.error
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

ASK_S = 5.0


def samples(address: tuple[str, int], name: str) -> list[tuple[dict[str, str], float]]:
    """Of one node. Raises AssertionError where it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics", timeout=ASK_S) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError) as error:
        raise AssertionError(f"no metrics at {address}") from error
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]


def total(addresses: Mapping[int, tuple[str, int]], name: str, **labels: str) -> float:
    """The sum over all nodes of the samples with these labels. Raises AssertionError where one does not answer."""
    return sum(
        value
        for address in addresses.values()
        for found, value in samples(address, name)
        if labels.items() <= found.items()
    )
