from services.bench.report import Change, Report


def result_page(report: Report) -> str:
    return ""


def compare_page(a: Report, b: Report, changes: list[Change]) -> str:
    return ""
