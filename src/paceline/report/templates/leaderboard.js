"use strict";
(() => {
  const body = document.querySelector("#board tbody");
  const rows = Array.from(body.rows);
  const heads = Array.from(document.querySelectorAll("#board thead th[data-key]"));
  const find = (id) => document.getElementById(id);
  const search = find("search"), family = find("family"), sort = find("sort"), all = find("all");
  // what is better stands first: rank counts up, every ratio and the score count down
  let order = { key: "rank", down: false };

  const value = (row, key) => {
    const text = row.dataset[key];
    return key === "name" ? text : text === "" ? null : Number(text);
  };

  function compare(a, b) {
    const x = value(a, order.key), y = value(b, order.key);
    if (x === null || y === null) return x === y ? 0 : x === null ? 1 : -1;  // missing: always last
    const by = typeof x === "string" ? x.localeCompare(y) : x - y;
    return order.down ? -by : by;
  }

  function show() {
    rows.slice().sort((a, b) => compare(a, b) || a.dataset.at - b.dataset.at)
      .forEach((row) => body.append(row));
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !(words.every((word) => row.dataset.text.includes(word))
        && (family.value === "" || row.dataset.family === family.value)
        && (all.checked || row.dataset.state === "ranked"));
      shown += row.hidden ? 0 : 1;
    }
    for (const head of heads) {
      if (head.dataset.key === order.key) {
        head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      } else {
        head.removeAttribute("aria-sort");
      }
    }
    sort.value = order.key;
    find("none").hidden = shown > 0;
    find("count").textContent = `${shown} of ${rows.length} entries`;
  }

  const first = (key) => ({ key, down: key !== "rank" && key !== "name" });
  for (const head of heads) {
    head.querySelector("button").addEventListener("click", () => {
      const key = head.dataset.key;
      order = order.key === key ? { key, down: !order.down } : first(key);
      show();
    });
  }
  sort.addEventListener("change", () => { order = first(sort.value); show(); });
  for (const tool of [search, family, all]) tool.addEventListener("input", show);
  find("tools").hidden = false;  // without scripts the table stands as it was written
  show();
})();
