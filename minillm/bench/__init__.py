"""Measurements for the record: `python3 -m minillm.bench STEP`, or `minillm bench STEP`.

Each step predicts from ceilings measured in the same run, seals the predictions, measures, checks that what ran was
right, and returns a record (minillm/roofline/record.py).
"""
