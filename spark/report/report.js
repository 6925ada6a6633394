"use strict";
for (const box of document.querySelectorAll(".copy")) {
  const button = document.createElement("button");
  const commands = box.querySelector("pre");
  button.type = "button";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(commands.textContent);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    } catch {
      getSelection().selectAllChildren(commands);
    }
  });
  box.append(button);
}

const find = document.querySelector("#find");
if (find) {
  const groups = [...document.querySelectorAll("details.kind")].map((box) => ({
    box,
    wasOpen: box.open,
    articles: [...box.querySelectorAll("article")].map((article, nth) => ({
      article,
      nth,
      text: article.textContent.toLowerCase(),
      topic: article.dataset.topic,
      time: Number(article.dataset.time),
      records: Number(article.dataset.records),
      silenced: "silenced" in article.dataset,
    })),
  }));
  const all = groups.flatMap((group) => group.articles);
  const orders = {
    "in the order of the report": (a, b) => a.nth - b.nth,
    "newest first": (a, b) => b.time - a.time || a.nth - b.nth,
    "most records first": (a, b) => b.records - a.records || a.nth - b.nth,
    "by topic": (a, b) => a.topic.localeCompare(b.topic) || a.nth - b.nth,
  };
  const labelled = (text, control) => {
    const label = document.createElement("label");
    label.append(text, control);
    find.append(label);
    return control;
  };
  const chosen = (text, options) => {
    const select = labelled(text, document.createElement("select"));
    select.append(...options.map(([name, value]) => new Option(name, value)));
    return select;
  };
  const search = labelled("search ", document.createElement("input"));
  search.type = "search";
  const topics = [...new Set(all.map((one) => one.topic))].sort();
  const topic = chosen("topic ", [["all", "*"], ...topics.map((name) => [name || "none", name])]);
  const order = chosen("", Object.keys(orders).map((name) => [name, name]));
  order.ariaLabel = "order";
  const silenced = document.createElement("input");
  silenced.type = "checkbox";
  if (all.some((one) => one.silenced)) labelled("without silenced ", silenced);
  const count = document.createElement("output");
  find.append(count);
  let filtered = false;
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const filters = words.length > 0 || topic.value !== "*" || silenced.checked;
    if (filters && !filtered) for (const group of groups) group.wasOpen = group.box.open;
    let shown = 0;
    for (const { box, wasOpen, articles } of groups) {
      let inGroup = 0;
      for (const one of articles) {
        const matches = words.every((word) => one.text.includes(word));
        one.article.hidden = !matches || (topic.value !== "*" && topic.value !== one.topic) || (silenced.checked && one.silenced);
        if (!one.article.hidden) inGroup += 1;
      }
      box.hidden = inGroup === 0;
      if (filters) box.open = inGroup > 0;
      else if (filtered) box.open = wasOpen;
      shown += inGroup;
    }
    filtered = filters;
    count.value = filters ? `${shown} of the ${all.length} findings on this page` : "";
  };
  const sort = () => {
    for (const { box, articles } of groups) {
      box.append(...articles.toSorted(orders[order.value]).map((one) => one.article));
    }
  };
  for (const control of [search, topic, silenced]) control.addEventListener("input", show);
  order.addEventListener("input", sort);
}
