"""For any client that has not logged in, or that no rule allows anything, a node reveals and changes nothing."""

from pathlib import Path

from tests.fuzz import secure

FRAMES = 4_000


def test_hostile_logins_and_security_requests(tmp_path: Path) -> None:
    report = secure.run(tmp_path / "node", frames=FRAMES, seed=13, bursts=1)
    assert report["answers_denied"] > FRAMES / 10, (
        "most requests of mallory must reach a check, or this proves nothing"
    )
    assert report["answers_confined"] > FRAMES / 10
    answers = report["answers"]
    for name in ("login sasl_authentication_failed", "login illegal_sasl_state", "confined none"):
        assert answers[name] > 0, f"{name} is not among {answers}"
    assert report["tls_handshakes"] > 0
