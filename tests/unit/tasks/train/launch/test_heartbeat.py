import os
import subprocess
import sys
import time

from paceline.tasks.train.launch.heartbeat import VARIABLE, Heartbeat, HeartbeatReader

RANK = "import time; from paceline.tasks.train.launch.heartbeat import Heartbeat\npulse = Heartbeat(); pulse.count_steps = lambda: 7\ntime.sleep(60)"  # noqa: E501


def test_a_rank_tells_its_steps_until_it_is_stopped():
    reader = HeartbeatReader()
    environment = os.environ | {VARIABLE: str(reader.writing)}
    rank = subprocess.Popen([sys.executable, "-c", RANK], env=environment, pass_fds=(reader.writing,))
    os.close(reader.writing)
    try:
        while reader.step is None:
            reader.read()
        assert reader.step == 7
        assert time.monotonic() - reader.last_beat < 60
    finally:
        rank.kill()
        rank.wait()
    reader.read()
    last = reader.last_beat
    reader.read()  # at its end: nothing comes, and nothing breaks
    assert reader.last_beat == last
    os.close(reader.reading)


def test_a_rank_without_a_supervisor_has_no_pulse(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Heartbeat().count_steps() is None


def test_last_words_need_no_disk():
    reader = HeartbeatReader()
    program = "from paceline.tasks.train.launch.heartbeat import Heartbeat; Heartbeat().final_error({'message': 'full', 'traceback': 'x' * 100_000})"  # noqa: E501
    environment = os.environ | {VARIABLE: str(reader.writing)}
    rank = subprocess.Popen([sys.executable, "-c", program], env=environment, pass_fds=(reader.writing,))
    os.close(reader.writing)
    while rank.poll() is None:
        reader.read()
        time.sleep(0.01)
    reader.read()
    assert reader.final_error == {"message": "full", "traceback": "x" * 100_000}
    os.close(reader.reading)
