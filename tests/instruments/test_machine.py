from mpcompare.instruments import machine


def test_the_commit_can_be_said_where_there_is_no_history(monkeypatch):
    monkeypatch.setenv("MPCOMPARE_COMMIT", "0123abc")
    assert machine._commit() == "0123abc"
