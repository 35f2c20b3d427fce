"""The paper's figures, entered a second time: two hands seldom slip at one place."""

from bothways.lab.paper.experiment import PUBLISHED, Published
from bothways.lab.paper.pretraining_tables import TABLES

ENTERED = """
Table 1, test | MNLI-m MNLI-mm QQP QNLI SST-2 CoLA STS-B MRPC RTE average
pre-OpenAI SOTA | 80.6 80.1 66.1 82.3 93.2 35.0 81.0 86.0 61.7 74.0
BiLSTM+ELMo+Attn | 76.4 76.1 64.8 79.8 90.4 36.0 73.3 84.9 56.8 71.0
OpenAI GPT | 82.1 81.4 70.3 87.4 91.3 45.4 80.0 82.3 56.0 75.1
BERT-Base | 84.6 83.4 71.2 90.5 93.5 52.1 85.8 88.9 66.4 79.6
BERT-Large | 86.7 85.9 72.1 92.7 94.9 60.5 86.5 89.3 70.1 82.1
Table 5, dev | MNLI-m QNLI SST-2
BERT-Base | 84.4 88.4 92.7
Table 2, dev | 1.1_EM 1.1_F1
BERT-Base | 80.8 88.5
BERT-Large | 84.1 90.9
BERT-Large, 7 models | 85.8 91.8
BERT-Large + TriviaQA | 84.2 91.1
BERT-Large, 7 models + TriviaQA | 86.2 92.2
Table 2, test | 1.1_EM 1.1_F1
human | 82.3 91.2
BERT-Large + TriviaQA | 85.1 91.8
BERT-Large, 7 models + TriviaQA | 87.4 93.2
Table 3, dev | 2.0_EM 2.0_F1
human | 86.3 89.0
BERT-Large | 78.7 81.9
Table 3, test | 2.0_EM 2.0_F1
human | 86.9 89.5
BERT-Large | 80.0 83.1
Table 4 | dev test
ESIM+GloVe | 51.9 52.7
ESIM+ELMo | 59.1 59.2
OpenAI GPT | - 78.0
BERT-Base | 81.6 -
BERT-Large | 86.6 86.3
human, expert | - 85.0
human, five annotations | - 88.0
Table 7 | dev test
ELMo | 95.7 92.2
CVT | - 92.6
CSE | - 93.1
BERT-Large, fine-tuned | 96.6 92.8
BERT-Base, fine-tuned | 96.4 92.4
BERT-Base, embeddings | 91.0 -
BERT-Base, second-to-last layer | 95.6 -
BERT-Base, last layer | 94.9 -
BERT-Base, weighted sum of the last four | 95.9 -
BERT-Base, concatenation of the last four | 96.1 -
BERT-Base, weighted sum of all twelve | 95.5 -
Devlin et al. 2018, table 5, dev | MNLI-m QNLI MRPC SST-2 SQuAD_1.1_F1
BERT-Base | 84.4 88.4 86.7 92.7 88.5
No NSP | 83.9 84.9 86.5 92.6 87.9
LTR & No NSP | 82.1 84.3 77.5 92.1 77.8
+ BiLSTM | 82.1 84.1 75.7 91.6 84.9
Devlin et al. 2018, table 6, dev | perplexity MNLI-m MRPC SST-2
L=3 H=768 A=12 | 5.84 77.9 79.8 88.4
L=6 H=768 A=3 | 5.24 80.6 82.2 90.7
L=6 H=768 A=12 | 4.68 81.9 84.8 91.3
L=12 H=768 A=12 | 3.99 84.4 86.7 92.9
L=12 H=1024 A=16 | 3.54 85.7 86.9 93.3
L=24 H=1024 A=16 | 3.23 86.6 87.8 93.7
Devlin et al. 2018, table 8, dev; MASK/SAME/RND in percent | MNLI-m NER NER_features
80/10/10 | 84.2 95.4 94.9
100/0/0 | 84.3 94.9 94.0
80/0/20 | 84.1 95.2 94.6
80/20/0 | 84.4 95.2 94.7
0/20/80 | 83.7 94.8 94.6
0/0/100 | 83.6 94.9 94.6
Wettig et al. 2022, figures of the README of their code; large | MNLI-m QNLI QQP SST-2
15 % | 84.2 90.9 87.8 93.3
20 % | 84.1 91.3 87.9 92.7
30 % | 84.2 91.6 88.0 93.0
40 % | 84.5 91.6 88.1 92.8
50 % | 84.1 91.1 88.1 92.7
60 % | 83.2 90.7 87.8 92.6
70 % | 82.3 89.4 87.5 91.9
80 % | 80.8 87.9 87.1 90.5
15 %, 80/10/10 | 83.7 90.4 87.8 93.2
40 %, 80/10/10 | 84.3 91.2 87.9 93.0
Liu et al. 2019, table 1 | SQuAD_2.0_F1 MNLI-m SST-2
reference BERT-Base | 76.3 84.3 92.8
static | 78.3 84.3 92.5
dynamic | 78.7 84.0 92.9
Liu et al. 2019, table 2, medians of five seeds | SQuAD_1.1_F1 SQuAD_2.0_F1 MNLI-m SST-2 RACE
SEGMENT-PAIR | 90.4 78.7 84.0 92.9 64.2
SENTENCE-PAIR | 88.7 76.2 82.9 92.1 63.0
FULL-SENTENCES | 90.4 79.1 84.7 92.5 64.8
DOC-SENTENCES | 90.6 79.7 84.7 92.7 65.6
Lan et al. 2019, table 5 | MLM_accuracy NSP_accuracy SOP_accuracy average_of_five_tasks
none | 54.9 52.4 53.3 79.0
NSP | 54.5 90.5 52.0 79.2
SOP | 54.0 78.9 86.5 80.1
Lan et al. 2019, table 4, embeddings of 128 features | average_of_five_tasks
all shared | 80.1
not shared | 81.6
attention shared | 81.7
FFN shared | 80.2
Clark et al. 2020, section 3.4, base, dev | GLUE_average
BERT | 82.2
ELECTRA | 85.0
"""


def entered() -> dict[tuple[str, str], dict[str, float]]:
    """For each table and system its figures by column; a line that names a table names the columns of those after it."""
    rows, table, columns = {}, "", list[str]()
    for line in ENTERED.strip().splitlines():
        name, _, rest = line.partition(" | ")
        if name.startswith("Table") or " et al. " in name:
            table, columns = name, [column.replace("_", " ") for column in rest.split()]
        else:
            rows[table, name] = {
                column: float(value)
                for column, value in zip(columns, rest.split(), strict=True)
                if value != "-"
            }
    return rows


def test_published_figures_match_papers():
    tables = (
        PUBLISHED["GLUE"],
        PUBLISHED["SQUAD"],
        PUBLISHED["SWAG"],
        PUBLISHED["NER"],
    )
    of_pretraining = (table.published for table in TABLES.values())
    rows: list[Published] = [row for table in (*tables, *of_pretraining) for row in table]
    assert {(row.table, row.system): dict(row.values) for row in rows} == entered()
    assert len(rows) == len(entered())
