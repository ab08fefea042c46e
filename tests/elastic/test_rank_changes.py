"""Counts of deaths and joins, also in a process that joins later and goes on as rank 0."""

from lightning_ring.elastic.rank_changes import RankChanges


def test_deaths_and_joins_are_counted_and_told():
    changes, newcomer = RankChanges(), RankChanges()
    assert not changes.of_view((0, 1, 2, 3), 0, 0.0)
    assert changes.of_view((0, 3), 12, 0.5)
    assert changes.latest == "processes 1, 2 died: 2 ranks after step 12"
    assert not changes.of_view((3, 0), 13, 0.1)  # the same ones in another order
    newcomer.load_state_dict(changes.state_dict())
    for one in (changes, newcomer):
        assert one.of_view((3, 4, 5), 20, 0.25)
        assert one.latest == "process 0 died, processes 4, 5 joined: 3 ranks after step 20"
        assert one.scalars() == {"ring/world_size": 3.0, "ring/deaths": 3.0, "ring/joins": 2.0}
        assert one.seconds == 0.25
