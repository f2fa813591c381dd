from paceline.flows.lifecycle.outage import plain, table


def test_text_from_outside_is_neither_markup_nor_a_row_of_its_own():
    evil = "a|b\n| c | <script>x</script> [y](javascript:z) `k`"
    assert plain(evil) == r"a\|b \| c \| &lt;script&gt;x&lt;/script&gt; \[y\](javascript:z) \`k\`"
    assert table(("", ""), [("accuracy", evil)]).count("\n") == 3
