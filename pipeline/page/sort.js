"use strict";
// Tables sort by the column whose heading is clicked; a value stands in data-v where its text does not sort.
for (const table of document.querySelectorAll("table.sorted")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  for (const head of table.tHead.querySelectorAll("th[data-at]")) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const at = Number(head.dataset.at), falls = head.ariaSort === "descending";
      const way = falls || (!head.ariaSort && !head.classList.contains("n")) ? 1 : -1;
      const value = row => { const cell = row.cells[at]; return cell.dataset.v ?? cell.textContent.trim(); };
      const compare = (a, b) => {
        const [left, right] = [value(a), value(b)];
        if (left === "" || right === "") return (left === "") - (right === "");
        const apart = Number(left) - Number(right);
        return way * (Number.isNaN(apart) ? left.localeCompare(right) : apart);
      };
      const last = [...body.rows].filter(row => row.classList.contains("others"));
      const rows = [...body.rows].filter(row => !row.classList.contains("others"));
      body.append(...rows.sort(compare), ...last);
      for (const other of table.tHead.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      head.ariaSort = way > 0 ? "ascending" : "descending";
    });
  }
}
