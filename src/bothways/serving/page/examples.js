// Examples for each task, one click away, in the languages of the page.

const FILMS = [
  { text: "A wonderful film, full of warmth and wit." },
  { text: "The plot is thin, the jokes are old, and it never seems to end." },
  { text: "Not bad at all, although I expected more from the last half hour." },
];
const FILMS_ZH = [
  { text: "一部温暖而风趣的好电影。" },
  { text: "情节单薄，笑点老套，而且长得看不到头。" },
  { text: "其实不差，只是最后半小时让人期待落空。" },
];

export const EXAMPLES = {
  en: {
    classify: FILMS,
    multilabel: FILMS,
    regress: [
      { text: "A man is playing a guitar.", second: "Somebody plays an instrument." },
      { text: "The cat sleeps on the sofa.", second: "Shares fell in early trading." },
    ],
    choice: [
      { text: "She opened the umbrella and stepped outside.", items: "It was raining hard.\nShe poured the soup into it.\nThe umbrella sang a song.\nHe parked the car." },
    ],
    tag: [
      { text: "Ada Lovelace was born in London and worked with Charles Babbage." },
      { text: "The European Commission met in Brussels before Angela Merkel flew to Tokyo." },
    ],
    answer: [
      { second: "Where was the treaty signed?", text: "After two years of talks, the treaty was signed in Vienna on 3 June 1815. Nine countries took part, and most of the borders that it drew lasted for decades." },
      { second: "What do bees collect?", text: "Worker bees fly up to five kilometres from the hive. They collect nectar and pollen, and on hot days also water, with which they cool the hive." },
    ],
    fill: [
      { text: "The capital of France is {mask}." },
      { text: "She {mask} the door and went {mask}." },
      { text: "Doctors advise people to {mask} more and to smoke less." },
    ],
    likelihood: [
      { text: "The quick brown fox jumps over the lazy dog." },
      { text: "The cat sat on the theory." },
    ],
    prefer: [
      { text: "The keys to the cabinet are on the table.", second: "The keys to the cabinet is on the table." },
    ],
    embed: [
      { items: "A man is playing a guitar.\nSomebody plays an instrument.\nThe orchestra tunes its violins.\nShe is cooking pasta.\nWe boil noodles for dinner.\nShares fell in early trading." },
      { items: "How do I reset my password?\nI cannot log in to my account.\nWhere can I see my invoices?\nThe app crashes when it starts.\nCan I pay by credit card?" },
    ],
    rerank: [
      { text: "how do bees cool their hive", items: "On hot days worker bees bring water and fan it with their wings.\nBees collect nectar and pollen within five kilometres of the hive.\nAir conditioning was invented in 1902.\nA hive should stand in half shade, facing south-east." },
    ],
  },
  zh: {
    classify: FILMS_ZH,
    multilabel: FILMS_ZH,
    regress: [{ text: "一个男人在弹吉他。", second: "有人在演奏乐器。" }, { text: "猫睡在沙发上。", second: "股市早盘下跌。" }],
    choice: [{ text: "她撑开伞走到外面。", items: "外面雨下得很大。\n她把汤倒了进去。\n伞唱起歌来。\n他把车停好。" }],
    tag: [{ text: "鲁迅出生在绍兴，后来在北京大学任教。" }, { text: "王芳周一从上海飞往东京参加联合国会议。" }],
    answer: [{ second: "条约在哪里签署？", text: "经过两年谈判，条约于1815年6月3日在维也纳签署，共有九个国家参加。" }],
    fill: [{ text: "法国的首都是{mask}{mask}。" }, { text: "今天天气很{mask}，我们去公园吧。" }],
    likelihood: [{ text: "敏捷的狐狸跳过了懒狗。" }, { text: "猫坐在理论上。" }],
    prefer: [{ text: "他昨天去了学校。", second: "他昨天去着学校。" }],
    embed: [{ items: "一个男人在弹吉他。\n有人在演奏乐器。\n她在煮意大利面。\n我们晚饭煮面条。\n股市早盘下跌。" }],
    rerank: [{ text: "蜜蜂怎样给蜂巢降温", items: "天热时工蜂带回水，并用翅膀扇风。\n蜜蜂在五公里范围内采集花蜜和花粉。\n空调发明于1902年。\n蜂箱应放在半阴处，朝向东南。" }],
  },
};
