// The words of the page in its languages.

const EN = {
  playground: "Playground", model: "Model", language: "Language", theme: "Colours", dark: "Dark", light: "Light", auto: "As the system",
  skip: "Skip to the result", input: "Input", examples: "Examples", clear: "Clear", addSecond: "Add a second text", removeSecond: "Remove the second text",
  result: "Result", why: "Why", tokens: "Tokens", code: "Code", views: "Views",
  text: "Text", second: "Second text", first: "First text", question: "Question", context: "Context", endings: "Endings, one per line",
  lines: "Texts, one per line", query: "Query", documents: "Documents, one per line", maskText: "Text with {mask}",
  waiting: "Computing …", empty: "Write something, or pick an example.", needMask: "Click a word below to hide it. The model fills the gap.",
  needTwo: "Write at least two lines.", needAll: "Fill in all fields.", maskHint: "Click a word to hide it, click again to bring it back.",
  classify: "One label for a text.", multilabel: "Any number of labels for a text.", regress: "A score for a text or a pair.", choice: "The ending that follows best.",
  tag: "A label for each word.", answer: "The passage that answers a question.", fill: "The words that fit a gap.", likelihood: "How expected each word is.",
  prefer: "The more likely of two texts.", embed: "How similar texts are in meaning.", search: "Documents of an index that answer a query.", rerank: "Documents in the order of relevance.",
  label: "Label", probability: "Probability", score: "Score", assigned: "assigned", numbers: "Numbers",
  noEntities: "No entity found.", entities: "Entities", type: "Type", word: "Word", words: "Words", tag_: "Tag", noAnswer: "No answer in this context.", otherAnswers: "Other candidates",
  filling: "Filling", gap: "Gap {n}", useIt: "Put it into the text", perplexity: "Pseudo-perplexity", surprisal: "Surprisal", bits: "bits",
  surprisalNote: "Each token is hidden in turn and predicted from all others. The darker, the less expected.", expected: "expected", surprising: "surprising",
  nearest: "Nearest", nearestTo: "Nearest to line {n}", line: "Line {n}", matrix: "Cosine of each pair of lines", rank: "Rank", relevance: "Relevance",
  ending: "Ending", preferred: "preferred", logLikelihood: "Log-likelihood", moved: "was {n}",
  piece: "Piece", id: "Id", characters: "Characters", special: "special", count: "{n} tokens", room: "The model reads {n}.", cutOff: "{n} are cut off.", allRead: "All are read.",
  training: "In training", trainingNote: "What masked language modelling reads of this text: token, segment (A or B) and position. A predicted token has the token of the text below it. Each epoch draws anew.",
  rate: "Masked", unit: "Unit", whole_words: "Whole words", ngrams: "N-grams", spans: "Spans", drawAgain: "Draw again", position: "Position", segment: "Segment", original: "Original", change: "Change",
  changeMasked: "masked", changeRandom: "random token", changeKept: "kept",
  tokensNote: "Pieces as the vocabulary spells them, with their ids.",
  method: "Method", leaveOut: "Leave one word out", attention: "Attention", explained: "Explained",
  raises: "raises the output", lowers: "lowers the output", effect: "Effect", layer: "Layer", heads: "Heads", head: "Head {n}", all: "All", none: "None",
  leaveOutNote: "The model reads the text again without each word; the number is how much the output falls. This is a fact about those shorter texts, which may read oddly. Words that matter only together show little.",
  attentionNote: "Attention shows which positions are mixed, not why the model answers as it does. High weight is not importance: compare with the other methods.",
  without: "Output for the whole text: {value}.",
  rollout: "Rollout", rolloutNote: "How much of each token reaches the chosen one through all layers (Abnar and Zuidema 2020).", from: "Token", hover: "Point at or focus a token on the left to see where it looks.",
  tagTarget: "Word", noWhy: "Explanations need a text for this task.",
  curl: "curl", python: "Python", json: "Answer (JSON)", copy: "Copy", copied: "Copied",
  unreachable: "The server does not answer. Is it still running?", keyNeeded: "This server asks for a key.", key: "API key", keyNote: "It stays in the memory of this page, and is gone when you close it.", open: "Open", wrongKey: "The key was not accepted.",
  time: "{ms} ms in all, {model} ms in the model", truncated: "The text is longer than the model reads: its end was ignored.", retry: "Try again", top: "The most probable", more: "{n} more",
  mode: "Search by", vectors: "Meaning", bm25: "Words", hybrid: "Both", reranker: "Ranked by", indexNote: "{n} documents, vectors in {stored}.", noHits: "No document was found.", emptyQuery: "Write a query.",
  against: "Beside", agree: "Both give the same answer.", differ: "The answers differ.", answer_: "Answer", facts: "What {name} is",
  facts_base: "Made of", facts_data: "Trained on", facts_dev: "Chosen on", facts_tokens: "Tokens read", facts_date: "Date", facts_labels: "Labels", facts_size: "Size",
  noTask: "This page has no view for the task {task}; the code tab shows how to use it.", weight: "Weight", looksAt: "Looks most at",
};

const ZH = {
  playground: "试玩", model: "模型", language: "语言", theme: "配色", dark: "深色", light: "浅色", auto: "跟随系统",
  skip: "跳到结果", input: "输入", examples: "示例", clear: "清空", addSecond: "添加第二段文本", removeSecond: "移除第二段文本",
  result: "结果", why: "为什么", tokens: "词元", code: "代码", views: "视图",
  text: "文本", second: "第二段文本", first: "第一段文本", question: "问题", context: "上下文", endings: "候选结尾，每行一个",
  lines: "文本，每行一条", query: "查询", documents: "文档，每行一篇", maskText: "含 {mask} 的文本",
  waiting: "计算中……", empty: "请输入文本，或选一个示例。", needMask: "点击下面的词将其掩盖，由模型来填。",
  needTwo: "请至少写两行。", needAll: "请填写所有输入框。", maskHint: "点击一个词将其掩盖，再点一次恢复。",
  classify: "给文本一个标签。", multilabel: "给文本任意多个标签。", regress: "给文本或文本对打分。", choice: "选出最合适的结尾。",
  tag: "给每个词一个标签。", answer: "在上下文中找出答案。", fill: "填出合适的词。", likelihood: "每个词有多出乎意料。",
  prefer: "两段文本中更可能的一段。", embed: "文本的含义有多接近。", search: "索引中能回答查询的文档。", rerank: "按相关性给文档排序。",
  label: "标签", probability: "概率", score: "分数", assigned: "已赋予", numbers: "数值",
  noEntities: "没有找到实体。", entities: "实体", type: "类型", word: "词", words: "词", tag_: "标签", noAnswer: "上下文中没有答案。", otherAnswers: "其他候选",
  filling: "填充", gap: "第 {n} 处", useIt: "填入文本", perplexity: "伪困惑度", surprisal: "惊异度", bits: "比特",
  surprisalNote: "依次掩盖每个词元，用其余词元来预测。颜色越深，越出乎意料。", expected: "意料之中", surprising: "出乎意料",
  nearest: "最接近", nearestTo: "与第 {n} 行最接近", line: "第 {n} 行", matrix: "每两行的余弦", rank: "名次", relevance: "相关性",
  ending: "结尾", preferred: "更可能", logLikelihood: "对数似然", moved: "原第 {n}",
  piece: "词元", id: "id", characters: "字符", special: "特殊", count: "{n} 个词元", room: "模型可读 {n} 个。", cutOff: "末尾 {n} 个被截去。", allRead: "全部读入。",
  training: "训练时", trainingNote: "掩码语言模型从这段文本读到的内容：词元、片段（A 或 B）和位置。要预测的词元下面是文本中的词元。每个 epoch 都重新抽取。",
  rate: "掩码比例", unit: "单位", whole_words: "全词", ngrams: "n-gram", spans: "跨度", drawAgain: "重新抽取", position: "位置", segment: "片段", original: "原词元", change: "改动",
  changeMasked: "掩盖", changeRandom: "随机词元", changeKept: "保持不变",
  tokensNote: "词表中的写法及其 id。",
  method: "方法", leaveOut: "逐词去除", attention: "注意力", explained: "解释对象",
  raises: "使输出升高", lowers: "使输出降低", effect: "影响", layer: "层", heads: "头", head: "头 {n}", all: "全选", none: "全不选",
  leaveOutNote: "模型重读去掉某个词之后的文本；数值是输出因此下降多少。它说的是那些较短的文本，读起来可能不自然；共同起作用的词各自看起来影响很小。",
  attentionNote: "注意力说明哪些位置被混合，而不是模型为何这样回答。权重大不等于重要：请与其他方法对照。",
  without: "整段文本的输出：{value}。",
  rollout: "注意力累积", rolloutNote: "各词元经所有层流入所选词元的份额（Abnar 与 Zuidema 2020）。", from: "词元", hover: "指向或聚焦左侧的词元，查看它关注哪里。",
  tagTarget: "词", noWhy: "该任务需要文本才能解释。",
  curl: "curl", python: "Python", json: "响应（JSON）", copy: "复制", copied: "已复制",
  unreachable: "服务器没有响应。它还在运行吗？", keyNeeded: "此服务器需要密钥。", key: "API 密钥", keyNote: "密钥只保存在本页内存中，关闭页面即消失。", open: "打开", wrongKey: "密钥无效。",
  time: "共 {ms} 毫秒，其中模型 {model} 毫秒", truncated: "文本超过模型可读的长度：末尾未读入。", retry: "重试", top: "最可能", more: "另有 {n} 个",
  mode: "检索依据", vectors: "含义", bm25: "词", hybrid: "两者", reranker: "重排序模型", indexNote: "{n} 篇文档，向量为 {stored}。", noHits: "没有找到文档。", emptyQuery: "请输入查询。",
  against: "对比", agree: "两个模型的回答相同。", differ: "两个模型的回答不同。", answer_: "答案", facts: "{name} 的来历",
  facts_base: "基础模型", facts_data: "训练数据", facts_dev: "开发集", facts_tokens: "读过的词元", facts_date: "日期", facts_labels: "标签", facts_size: "大小",
  noTask: "本页没有任务 {task} 的视图；“代码”一栏说明如何使用。", weight: "权重", looksAt: "最关注",
};

export const LANGUAGES = { en: "English", zh: "中文" };
const WORDS = { en: EN, zh: ZH };
let words = EN;
export let language = "en";

/** Choose the language: the one asked for, or the first of the browser's that the page has. */
export function speak(asked) {
  const wanted = [asked, ...(navigator.languages ?? [])].filter(Boolean).map((name) => name.slice(0, 2));
  language = wanted.find((name) => name in WORDS) ?? "en";
  words = WORDS[language];
  document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
}

/** Return a text of the page, with values for its {names}. */
export function t(name, values = {}) {
  return (words[name] ?? EN[name] ?? name).replace(/\{(\w+)\}/g, (_, key) => String(values[key] ?? ""));
}
