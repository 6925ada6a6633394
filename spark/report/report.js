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
