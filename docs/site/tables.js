/* Pages with long tables get a filter: rows that have all of its words stay, and tables without any go with their headings.
   The words stand in the address (?rows=...), so that a filtered page can be linked to. */
(function () {
  "use strict";
  const LONG = 30;
  const NAME = "rows";
  const HEADING = /^H[1-6]$/;

  function rowsOf(content) {
    return [...content.querySelectorAll("table tbody tr")].map((row) => ({ row, text: row.textContent.toLowerCase() }));
  }

  /* What stands between a heading and the next one of its level, so that both go together. */
  function parts(content) {
    const found = [];
    for (const heading of content.querySelectorAll("h2, h3, h4")) {
      const inside = [];
      for (let next = heading.nextElementSibling; next; next = next.nextElementSibling) {
        if (HEADING.test(next.tagName) && next.tagName <= heading.tagName) break;
        inside.push(next);
      }
      found.push({ heading, inside, tables: inside.flatMap((one) => tablesOf(one)) });
    }
    return found;
  }

  /* What stands before the first heading of a section: of no use beside a few rows. */
  function opening(content) {
    const found = [];
    for (let next = content.querySelector("h1").nextElementSibling; next && !HEADING.test(next.tagName); next = next.nextElementSibling) {
      found.push(next);
    }
    return found;
  }

  function tablesOf(element) {
    return element.matches("table") ? [element] : [...element.querySelectorAll("table")];
  }

  function isEmpty(table) {
    return !table.querySelector("tbody tr:not(.filtered-out)");
  }

  function apply(content, rows, first, sections, words, output) {
    let shown = 0;
    for (const element of first) element.classList.toggle("filtered-out", words.length > 0);
    for (const { row, text } of rows) {
      const stays = words.every((word) => text.includes(word));
      row.classList.toggle("filtered-out", !stays);
      shown += stays;
    }
    for (const table of content.querySelectorAll("table")) {
      const box = table.closest(".md-typeset__scrollwrap") || table;
      box.classList.toggle("filtered-out", words.length > 0 && isEmpty(table));
    }
    for (const { heading, inside, tables } of sections) {
      const gone = words.length > 0 && tables.every(isEmpty);
      for (const element of [heading, ...inside.filter((one) => !HEADING.test(one.tagName) && !tablesOf(one).length)]) {
        element.classList.toggle("filtered-out", gone);
      }
    }
    output.textContent = words.length ? `${shown} of ${rows.length} rows` : `${rows.length} rows`;
  }

  function address(value) {
    const here = new URL(window.location.href);
    if (value) here.searchParams.set(NAME, value);
    else here.searchParams.delete(NAME);
    return here;
  }

  function start() {
    const content = document.querySelector("article.md-content__inner");
    const rows = content ? rowsOf(content) : [];
    if (rows.length < LONG || content.querySelector(".filter")) return;
    const first = opening(content);
    const sections = parts(content);
    const bar = document.createElement("div");
    bar.className = "filter";
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "Filter rows: words, in any order";
    input.setAttribute("aria-label", "Filter the rows of all tables on this page");
    const output = document.createElement("output");
    bar.append(input, output);
    content.querySelector("h1").after(bar);
    const run = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      apply(content, rows, first, sections, words, output);
    };
    input.value = new URLSearchParams(window.location.search).get(NAME) || "";
    let waiting = 0;
    input.addEventListener("input", () => {
      window.clearTimeout(waiting);
      waiting = window.setTimeout(() => {
        run();
        if (window.location.protocol !== "file:") window.history.replaceState(null, "", address(input.value.trim()));
      }, 80);
    });
    run();
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();

/* The search takes a word that begins with a hyphen for one that must not be there, and splits others at theirs: a flag is searched
   for as the setting that it sets, and so is a word with several hyphens; one with a single hyphen also as a name. */
(function () {
  "use strict";
  const QUERY = 2;
  const send = Worker.prototype.postMessage;

  function asNames(query) {
    const words = query.split(/(\s+|")/).map((word) => {
      const name = word.replace(/^-+(?=\w)/, "").replace(/-/g, "_");
      return /^-|\w-\w+-\w/.test(word) ? name : /\w-\w/.test(word) ? `${word} ${name}` : word;
    });
    return words.join("");
  }

  Worker.prototype.postMessage = function (message, ...rest) {
    const asked = message && message.type === QUERY && typeof message.data === "string";
    return send.call(this, asked ? { ...message, data: asNames(message.data) } : message, ...rest);
  };
})();
