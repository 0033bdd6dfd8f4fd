"""The page of results is generated from the history of figures."""

from benchmarks.results_page import RESULTS, environments, page, read


def test_the_page_of_results_is_the_one_that_the_script_writes():
    assert (RESULTS / "README.md").read_text() == page(read())


def test_every_raw_file_names_the_commit_and_the_command_that_made_it():
    for path in RESULTS.glob("*.json*"):
        for facts in environments(path):
            assert facts["commit"], path
            assert facts["command"], path
