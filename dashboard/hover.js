// The whole text of a cell that has no room for it, when the pointer rests on it. Streamlit draws tables on a canvas and has no such thing: what
// its grid knows of its cells is read from React. Where that changes, nothing is shown.
if (!window.showsWholeTexts) {
  window.showsWholeTexts = true;
  const gridOf = canvas => {
    let node = canvas[Object.keys(canvas).find(key => key.startsWith('__reactFiber'))];
    while (node && !(node.memoizedProps && 'cellXOffset' in node.memoizedProps)) node = node.return;
    return node && node.memoizedProps;
  };
  const cellAt = (grid, x, y) => {
    const row = grid.cellYOffset + Math.floor((y - grid.headerHeight - grid.translateY) / grid.rowHeight);
    let [at, left] = [grid.cellXOffset, grid.translateX];
    while (at < grid.columns.length && x > left + grid.columns[at].width) left += grid.columns[at++].width;
    if (y < grid.headerHeight || row >= grid.rows || at >= grid.columns.length) return ['', 0];
    const cell = grid.getCellContent([at, row]);
    return [String(cell.displayData || cell.copyData || ''), Math.min(grid.columns[at].width, grid.width - left)];
  };
  document.addEventListener('mousemove', event => {
    const table = event.target.closest('[data-testid=stDataFrame]');
    const canvas = table && table.querySelector('canvas');
    if (!canvas) return;
    try {
      const frame = canvas.getBoundingClientRect();
      const [text, width] = cellAt(gridOf(canvas), event.clientX - frame.left, event.clientY - frame.top);
      const pen = document.createElement('canvas').getContext('2d');
      pen.font = '14px "Source Sans", sans-serif';
      table.title = pen.measureText(text).width > width - 16 ? text : '';
    } catch {
      table.title = '';
    }
  });
}
