"""One model of cost, used by the lessons, the benches and later by scheduler, router and planner. Lesson 00.

device.py    ceilings of a machine: from a datasheet (a lead) or measured here (measure.py)
cost.py      FLOPs and bytes of every operator of a step, counted, not believed
predict.py   seconds from both: lower bound, expected, upper bound, term by term
fit.py       what part of a ceiling the operators reach here, judged on shapes the fit never saw
capacity.py  what a request costs and how many a machine can take: C = a m + b n, the knee, Little's law (lesson 13)
comm.py      what ranks pay to speak to each other: a + 2 (N - 1) / N * bytes / bandwidth, fitted (lesson 14)
parallel.py  steps and memory of a model over several ranks (lesson 14)
record.py    predictions sealed before the measurement, beside it, with where and how
evidence.py  looks numbers up in the committed records, and checks the records
"""
