"""A repository of git whose program becomes slower at one commit, by real work."""

import subprocess

PROGRAM = """
total = 0
for number in range({num_steps}):
    total += number * number % 7
print(total)
"""


def make_history(place, num_commits, slow, num_steps, slowdown):
    """A root and so many commits; from the one with the number `slow` on, the program does more work."""
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    place.mkdir(parents=True)
    subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=True)
    for number in range(num_commits + 1):
        steps = round(num_steps * (1 + slowdown)) if slow and number >= slow else num_steps
        (place / "work.py").write_text(PROGRAM.format(num_steps=steps))
        (place / "notes.txt").write_text(f"{number}")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "--message", f"Change {number}"], check=True)
