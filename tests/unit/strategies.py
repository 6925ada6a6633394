"""Values that Hypothesis draws for the tests of several packages."""

from hypothesis import strategies as st

from service.claims.states import Delivered
from service.pipeline.request import Delivery


def deliveries(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[list[Delivery]]:
    """Draw one to five deliveries, whose times, partition and offset are `numbers`."""
    topics = st.from_regex(r"[a-zA-Z0-9._-]{1,249}", fullmatch=True)
    delivered = st.builds(Delivered, numbers, st.binary(min_size=8, max_size=8), topics, numbers, numbers, numbers)
    return st.lists(st.tuples(st.binary(min_size=16, max_size=16), delivered), min_size=1, max_size=5)
