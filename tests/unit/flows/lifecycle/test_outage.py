import logging
import os

from prefect.logging.handlers import PrefectConsoleHandler

from paceline.flows.lifecycle.outage import guard_flow, plain, table


def test_a_flow_continues_when_nobody_reads_its_log_any_more():
    guard_flow(lambda: None)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        handler = PrefectConsoleHandler(stream)
        handler.handle(logging.makeLogRecord({"msg": "first", "level": logging.INFO}))
        assert os.read(reader, 100).endswith(b"first\n")
        os.close(reader)
        for _ in range(2):
            handler.handle(logging.makeLogRecord({"msg": "nobody reads this", "level": logging.INFO}))
        os.write(writer, b"what another library prints")


def test_text_from_outside_is_neither_markup_nor_a_row_of_its_own():
    evil = "a|b\n| c | <script>x</script> [y](javascript:z) `k`"
    assert plain(evil) == r"a\|b \| c \| &lt;script&gt;x&lt;/script&gt; \[y\](javascript:z) \`k\`"
    assert table(("", ""), [("accuracy", evil)]).count("\n") == 3
