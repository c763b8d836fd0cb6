"use strict";
/* Markdown as nodes. What a model writes becomes text and the elements that are made here: no HTML of it is ever read,
   no image loaded, and a link leads to http, https or mailto alone. */

const MOST_NESTED = 12; // lists, quotes and emphasis in each other
const MOST_INLINE = 5000; // characters of a text that is searched for emphasis, code and links

function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/* Return a button with a class by which its clicks are known, and a name for who hears the page. */
const button = (does, text, ariaLabel) => Object.assign(make("button", does, text), {type: "button", ariaLabel});

// --- Within a line: each rule is an expression, and what makes nodes of its match, or null where it is none

// Of emphasis: marks within code and behind a backslash do not end it.
const WHOLE = String.raw`\\.|\x60[^\x60]*\x60`, BODY = String.raw`((?:${WHOLE}|[^\\\x60])*?(?:${WHOLE}|[^\s\\\x60]))`;
const within = (mark, tags, before, after) => [
  new RegExp(String.raw`${before}${mark}(?![\s${mark.at(-1)}])${BODY}${mark}${after}`, "ys"),
  ([, body], depth) => tags.reduce((nodes, tag) => [make(tag, "", ...nodes)], inline(body, depth))[0],
];
const code = ([, , text]) => make("code", "", text.replace(/^ (.*\S.*) $/s, "$1"));
const ENTITIES = {lt: "<", gt: ">", amp: "&", quot: '"', nbsp: "\u00a0", "#39": "'"};

function link(label, url) {
  if (!/^(https?:\/\/|mailto:)/i.test(url) || !URL.canParse(url)) return null;
  return Object.assign(make("a", "", ...label), {href: url, target: "_blank", rel: "noopener noreferrer"});
}

// Of [words](url "title"): its words may have code or one more [pair] in them, its url one (pair).
const LABEL = String.raw`\[((?:\\.|\x60[^\x60]*\x60|\[[^[\]]*\]|[^[\]\\\x60])*)\]`;
const PLACE = String.raw`\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)`;

const RULES = [
  [/\\([!-/:-@[-`{-~])/y, ([, plain]) => plain],
  [/(?<!`)(`+)(?!`)(.*?[^`])\1(?!`)/ys, code],
  [new RegExp(`!?${LABEL}${PLACE}`, "ys"), ([, label, url], depth) => link(inline(label || url, depth), url)],
  [/<((?:https?:\/\/|mailto:)[^\s<>]+)>/yi, ([, url]) => link([url], url)],
  [/(?<!\w)https?:\/\/[^\s<>"`]*[^\s<>"`'.,:;!?)\]*_~]/yi, ([url]) => link([url], url)],
  [/<br ?\/?>/yi, () => "\n"],
  [/&(lt|gt|amp|quot|nbsp|#39);/y, ([, name]) => ENTITIES[name]],
  within("\\*\\*\\*", ["em", "strong"], "", "(?!\\*)"),
  within("\\*\\*", ["strong"], "", "(?!\\*)"),
  within("\\*", ["em"], "(?<![\\w*])", "(?<!\\*\\*)(?!\\*)"), // 2*3*4 is none
  within("__", ["strong"], "(?<!\\w)", "(?!\\w)"),
  within("_", ["em"], "(?<!\\w)", "(?!\\w)"),
  within("~~", ["del"], "", ""),
];
/* Where an answer that still comes ends within code or bold text, its end is on the way. */
const UNFINISHED = [
  [/(?<!`)(`)(?!`)(.*)$/ys, code],
  [/\*\*(?![\s*])(.+)$/ys, ([, body], depth) => make("strong", "", ...inline(body, depth, true))],
];

function inline(text, depth = 0, isOpen = false) {
  if (text.length > MOST_INLINE || depth > MOST_NESTED) return [text];
  const nodes = [], rules = isOpen ? [...RULES, ...UNFINISHED] : RULES;
  let from = 0;
  for (let at = 0; at < text.length; at++) {
    if (!"\\`*_~<&![hH".includes(text[at])) continue;
    for (const [rule, nodeOf] of rules) {
      rule.lastIndex = at;
      const found = rule.exec(text), node = found && nodeOf(found, depth + 1);
      if (node === null) continue;
      nodes.push(text.slice(from, at), node);
      from = at + found[0].length;
      at = from - 1;
      break;
    }
  }
  return [...nodes, text.slice(from)].filter((node) => node !== "");
}

// --- Blocks of lines: each reader returns the node of the block that begins at a line, and the line after it; or null

const FENCE = /^(\s*)(`{3,}|~{3,})([^`]*)$/, HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const RULED = /^ {0,3}([-*_])(\s*\1){2,}\s*$/, QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(.*)$/, DASHES = /^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?$/;

const indentOf = (line) => /^\s*/.exec(line)[0].replaceAll("\t", "    ").length;

function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function isTable(lines, at) {
  const head = lines[at], dashes = lines[at + 1] ?? "";
  return head.includes("|") && DASHES.test(dashes.trim()) && cellsOf(head).length === cellsOf(dashes).length;
}

/* Return whether a paragraph ends before a line. */
function interrupts(lines, at) {
  const isItem = /^ {0,3}([-*+]|1[.)])\s+\S/.test(lines[at]);
  return isItem || isTable(lines, at) || [FENCE, HEADING, RULED, QUOTE].some((begin) => begin.test(lines[at]));
}

/* Take away up to so many columns of what a line is indented by. */
function dedent(line, columns) {
  let at = 0;
  for (let taken = 0; taken < columns && /\s/.test(line[at] ?? "x"); at++) taken += line[at] === "\t" ? 4 : 1;
  return line.slice(at);
}

/* Let keys move what is wider than the page. */
const movable = (element, ariaLabel) => Object.assign(element, {tabIndex: 0, role: "region", ariaLabel});

function codeBlock(text, language) {
  const bar = make("div", "bar", make("span", "soft", language), button("copy", "Copy", "Copy the code"));
  return make("div", "code", bar, movable(make("pre", "", make("code", "", text)), "Code"));
}

function fence(lines, at, {isOpen}) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const closes = (line) => line.trim().startsWith(open[2]) && !line.trim().replaceAll(open[2][0], "");
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end++;
  const body = lines.slice(at + 1, end).map((line) => dedent(line, indentOf(open[1])));
  if (isOpen && end === lines.length && /^[`~]{1,2}$/.test(body.at(-1))) body.pop(); // half of its end
  return [codeBlock(body.join("\n"), open[3].trim().split(/\s/)[0]), end + 1];
}

function heading(lines, at, {depth, isOpen}) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const text = (found[2] ?? "").replace(/\s#+\s*$/, "");
  const level = Math.min(6, found[1].length + 2); // below the page's own
  return [make(`h${level}`, "", ...inline(text, depth, isOpen && at + 1 === lines.length)), at + 1];
}

const ruled = (lines, at) => RULED.test(lines[at]) ? [make("hr"), at + 1] : null;

function quote(lines, at, how) {
  const goesOn = (next) => QUOTE.test(lines[next]) || (next > at && lines[next].trim() && !interrupts(lines, next));
  let end = at;
  while (end < lines.length && goesOn(end)) end++;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return end === at ? null : [make("blockquote", "", ...nested(inside, how, end === lines.length)), end];
}

/* Return the line after an item: lines below it are its own where they are indented, or go on with its text. */
function endOfItem(lines, at, indent) {
  let end = at + 1;
  for (let next = end; next < lines.length; next++) {
    if (!lines[next].trim()) continue;
    const goesOn = next === end && !ITEM.test(lines[next]) && !interrupts(lines, next) && !FENCE.test(lines[next - 1]);
    if (indentOf(lines[next]) < indent && !goesOn) break;
    end = next + 1;
  }
  return end;
}

function list(lines, at, how) {
  const itemOf = (line = "") => RULED.test(line) ? null : ITEM.exec(line), isOrdered = (item) => /\d/.test(item[2]);
  const begin = itemOf(lines[at]);
  if (!begin) return null;
  const place = make(isOrdered(begin) ? "ol" : "ul");
  if (isOrdered(begin)) place.start = parseInt(begin[2]);
  let end = at;
  for (let next = at, item = begin; item && isOrdered(item) === isOrdered(begin); item = itemOf(lines[next])) {
    const [, before, mark, gap, first] = item, own = indentOf(before);
    end = endOfItem(lines, next, own + 2);
    const below = lines.slice(next + 1, end);
    let columns = own + mark.length + Math.min(4, gap.length);
    for (const line of below) if (line.trim() && indentOf(line) >= own + 2) columns = Math.min(columns, indentOf(line));
    const inside = [first, ...below.map((line) => dedent(line, columns))];
    place.append(make("li", "", ...nested(inside, how, end === lines.length)));
    for (next = end; next < lines.length && !lines[next].trim();) next++;
  }
  return [place, end];
}

function table(lines, at, {depth}) {
  if (!isTable(lines, at)) return null;
  const sideOf = (dashes) => dashes.endsWith(":") ? (dashes.startsWith(":") ? "center" : "right") : "";
  const sides = cellsOf(lines[at + 1]).map(sideOf);
  const row = (line, tag) => {
    const cells = cellsOf(line);
    return make("tr", "", ...sides.map((side, place) => make(tag, side, ...inline(cells[place] ?? "", depth))));
  };
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const body = make("tbody", "", ...lines.slice(at + 2, end).map((line) => row(line, "td")));
  const whole = make("table", "", make("thead", "", row(lines[at], "th")), body);
  return [movable(make("div", "scroll", whole), "Table"), end];
}

function indented(lines, at) {
  const isBlank = (next) => !lines[next].trim();
  let end = at;
  for (let next = at; next < lines.length && (isBlank(next) || indentOf(lines[next]) >= 4); next++) {
    if (!isBlank(next)) end = next + 1;
  }
  const text = lines.slice(at, end).map((line) => dedent(line, 4)).join("\n");
  return end === at ? null : [codeBlock(text, ""), end];
}

function paragraph(lines, at, {depth, isOpen}) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end++;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return [make("p", "", ...inline(text, depth, isOpen && end === lines.length)), end];
}

/* Yield the blocks of lines: the line where each begins, and its node. `isOpen`: the last line may go on. */
function* blocks(lines, how) {
  const readers = how.depth < MOST_NESTED ? [fence, heading, ruled, quote, list, table, indented] : [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at++; continue; }
    let read = null;
    for (const reader of [...readers, paragraph]) if ((read = reader(lines, at, how))) break;
    yield {at, node: read[0]};
    at = read[1];
  }
}

function nested(lines, {depth, isOpen}, isLast) {
  return [...blocks(lines, {depth: depth + 1, isOpen: isOpen && isLast})].map(({node}) => node);
}

// --- An answer as it comes

/* Make the children of a place, from one on, like these nodes, and touch none that is so already: nothing flickers, and
   what is marked stays marked. */
function morph(place, nodes, from = 0) {
  nodes.forEach((next, at) => {
    const old = place.childNodes[from + at], text = old?.data;
    if (!old) place.append(next);
    else if (text !== undefined && next.data?.startsWith(text)) old.appendData(next.data.slice(text.length));
    else if (old.cloneNode(false).isEqualNode(next.cloneNode(false))) morph(old, [...next.childNodes]);
    else old.replaceWith(next);
  });
  while (place.childNodes.length > from + nodes.length) place.lastChild.remove();
}

/* Writes Markdown into a place. When more comes, only the last block is read again, a quarter of the time at most. */
class Writing {
  #tail = ""; // what the last block has, and more may change
  #fixed = 0; // blocks before it
  #timer = 0;
  #rest_ms = 0;

  constructor(place, isPlain, onShow) {
    this.place = place;
    this.isPlain = isPlain;
    this.onShow = onShow; // is given what changes the page
  }

  add(piece) {
    this.#tail += piece;
    this.#timer ||= setTimeout(() => this.show(true), this.#rest_ms);
  }

  /* Show what has come, as the whole text unless it `isOpen`. */
  show(isOpen = false) {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const began = performance.now();
    this.onShow(() => this.isPlain ? this.#showPlain() : this.#showBlocks(isOpen));
    this.#rest_ms = Math.max(30, 3 * (performance.now() - began));
  }

  #showPlain() {
    this.place.append(this.#tail);
    this.#tail = "";
  }

  #showBlocks(isOpen) {
    const lines = this.#tail.split("\n"), found = [...blocks(lines, {depth: 0, isOpen})];
    morph(this.place, found.map(({node}) => node), this.#fixed);
    const last = found.findLastIndex(({at}) => at < lines.length - 1); // the last line may become another block
    if (last < 1) return;
    this.#fixed += last;
    this.#tail = lines.slice(found[last].at).join("\n");
  }
}
