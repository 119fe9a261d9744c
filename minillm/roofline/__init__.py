"""One model of cost, used by the lessons, the benches and later by scheduler, router and planner. Lesson 00.

device.py    ceilings of a machine: from a datasheet (a lead) or measured here (measure.py)
cost.py      FLOPs and bytes of every operator of a step, counted, not believed
predict.py   seconds from both: lower bound, expected, upper bound, term by term
fit.py       what part of a ceiling the operators reach here, judged on shapes the fit never saw
record.py    predictions sealed before the measurement, beside it, with where and how
evidence.py  looks numbers up in the committed records, and checks the records
"""
