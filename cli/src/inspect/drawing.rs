//! A [`Grid`] as a drawing of characters: who holds which box.
//!
//! ```text
//!            [0,32)  [32,64)
//!           +-------+-------+
//!   [0,16)  | 0     | 1     |
//!           +-------+-------+
//!   [16,32) | 2     | 3     |
//!           +-------+-------+
//! ```

use std::io::IsTerminal;

use ir::placement::Mesh;

use crate::grid::{Band, Cell, Cuts, Grid, Room};
use crate::report::Ui;
use crate::table::{WIDTH, grouped, plural};

use super::tensors::ranges;

/// Rows that are drawn at most.
const ROWS: usize = 12;
/// Columns that are drawn at most, if there is room.
const COLUMNS: usize = 16;
/// Backgrounds of boxes, of the 256 colours that terminals have: light, for black text.
const PALETTE: [u8; 8] = [153, 222, 157, 218, 189, 180, 159, 224];

/// What the terminal can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Lines of boxes, or ASCII.
    pub lines: bool,
    /// Colours.
    pub colors: bool,
    /// Characters of a line.
    pub width: usize,
}

impl Style {
    /// What stdout can show: ASCII and no colours where it is no terminal, unless colours are forced.
    pub fn of_stdout(ui: &Ui) -> Style {
        let terminal = std::io::stdout().is_terminal();
        Style { lines: terminal, colors: ui.color.is_on(terminal), width: width(terminal) }
    }
}

/// Of the terminal, or what `COLUMNS` says.
fn width(terminal: bool) -> usize {
    let said = std::env::var("COLUMNS").ok().and_then(|it| it.parse().ok());
    let asked = || rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|it| it.ws_col.into());
    let width = said.or_else(|| if terminal { asked() } else { None });
    width.filter(|it| *it > 0).unwrap_or(WIDTH).max(40)
}

/// A tensor that can be drawn.
pub struct Subject<'a> {
    /// Where its elements live.
    pub sharding: &'a ir::placement::Sharding,
    /// Its global shape.
    pub shape: &'a [u64],
    /// Bytes of an element.
    pub element: u64,
}

/// The drawing, in which boxes of `chosen` ranks are marked, and what it leaves out.
pub fn drawing(
    subject: &Subject,
    mesh: &Mesh,
    cuts: &mut Cuts,
    chosen: &[u64],
    style: Style,
) -> String {
    for columns in (3..=COLUMNS).rev() {
        let room = Room { bands: [ROWS, columns], chosen };
        let Subject { sharding, shape, element } = *subject;
        let Some(grid) = Grid::of(sharding, shape, element, mesh, cuts, room) else {
            return "  too many pieces to draw\n".to_string();
        };
        let drawing = Drawing::of(&grid, mesh, chosen);
        if columns == 3 || drawing.width() <= style.width {
            return drawing.text(style) + &notes(&grid, chosen);
        }
    }
    unreachable!("three columns are drawn in any case")
}

/// Text of all bands, and boxes between them.
struct Drawing {
    rows: Vec<String>,
    columns: Vec<String>,
    /// Row by row; none where a row or column is folded.
    cells: Vec<Vec<Option<(String, usize, bool)>>>,
    label: usize,
    widths: Vec<usize>,
}

impl Drawing {
    fn of(grid: &Grid, mesh: &Mesh, chosen: &[u64]) -> Drawing {
        let label = |side: usize, it: &Band| match it {
            Band::Piece(it) => match grid.dims[side] {
                Some(_) => format!("[{},{})", it.range[0], it.range[1]),
                None => String::new(),
            },
            Band::Folded { n, .. } => format!("{} more", grouped(*n as u64)),
        };
        let labels =
            |side: usize| grid.bands[side].iter().map(|it| label(side, it)).collect::<Vec<_>>();
        let (rows, columns) = (labels(0), labels(1));
        let cell = |row, column| {
            let cell = grid.cell(mesh, row, column)?;
            let marked = holds(&cell, mesh, grid, chosen);
            Some((format!("{}{}", if marked { "*" } else { "" }, ranks(&cell)), cell.color, marked))
        };
        let cells: Vec<Vec<_>> = (0..rows.len())
            .map(|row| (0..columns.len()).map(|column| cell(row, column)).collect())
            .collect();
        let chars = |it: &str| it.chars().count();
        let of_column = |column: usize| {
            let texts = cells.iter().filter_map(|it| it[column].as_ref());
            texts.map(|it| chars(&it.0)).max().unwrap_or(0).max(chars(&columns[column])).max(3)
        };
        let widths = (0..columns.len()).map(of_column).collect();
        let label = rows.iter().map(|it| chars(it)).max().unwrap_or(0);
        Drawing { rows, columns, cells, label, widths }
    }

    fn width(&self) -> usize {
        let columns: usize = self.widths.iter().map(|it| it + 3).sum();
        2 + self.label + 1 + columns + 1
    }

    fn text(&self, style: Style) -> String {
        let ([left, middle, right], line, bar, dots) = match style.lines {
            true => (["├", "┼", "┤"], "─", "│", "⋮"),
            false => (["+", "+", "+"], "-", "|", ":"),
        };
        let rule = |[left, middle, right]: [&str; 3]| {
            let columns = self.widths.iter().map(|it| line.repeat(it + 2));
            let columns: Vec<String> = columns.collect();
            format!("  {:1$} {left}{2}{right}\n", "", self.label, columns.join(middle))
        };
        let (top, bottom) = match style.lines {
            true => (rule(["┌", "┬", "┐"]), rule(["└", "┴", "┘"])),
            false => (rule(["+"; 3]), rule(["+"; 3])),
        };
        let mut res = String::new();
        if self.columns.iter().any(|it| !it.is_empty()) {
            let columns = self.columns.iter().zip(&self.widths);
            let columns: String = columns.map(|(it, width)| format!("  {it:<width$} ")).collect();
            let line = format!("  {:1$} {columns}", "", self.label);
            res.push_str(&format!("{}\n", line.trim_end()));
        }
        res.push_str(&top);
        for (index, (row, cells)) in self.rows.iter().zip(&self.cells).enumerate() {
            if index > 0 {
                res.push_str(&rule([left, middle, right]));
            }
            res.push_str(&format!("  {row:<0$} ", self.label));
            let all_folded = cells.iter().all(Option::is_none);
            for (cell, &width) in cells.iter().zip(&self.widths) {
                res.push_str(bar);
                res.push_str(&match cell {
                    Some((text, color, marked)) => {
                        painted(&format!(" {text:<width$} "), *color, *marked, style)
                    }
                    None if all_folded => format!(" {dots:^width$} "),
                    None => format!(" {:^width$} ", ".."),
                });
            }
            res.push_str(bar);
            res.push('\n');
        }
        res + &bottom
    }
}

fn painted(text: &str, color: usize, marked: bool, style: Style) -> String {
    if !style.colors {
        return text.to_string();
    }
    let background = PALETTE[color];
    let bold = if marked { "1;4;" } else { "" };
    format!("\x1b[{bold}38;5;16;48;5;{background}m{text}\x1b[0m")
}

/// `0, 4`; `0, 8..16376 (2,048)`.
fn ranks(cell: &Cell) -> String {
    match cell.ranks.as_slice() {
        all if all.len() as u64 == cell.n_ranks => {
            let text = ranges(all);
            if text.chars().count() <= 20 { text } else { few(all, cell.n_ranks) }
        }
        some => few(some, cell.n_ranks),
    }
}

fn few(ranks: &[u64], n: u64) -> String {
    format!("{}, {}.. ({})", ranks[0], ranks[1], grouped(n))
}

/// Whether one of the chosen ranks holds the box.
fn holds(cell: &Cell, mesh: &Mesh, grid: &Grid, chosen: &[u64]) -> bool {
    let Some(&first) = cell.ranks.first() else { return false };
    let at = mesh.coord_of(first);
    let same = |rank: u64| {
        let coord = mesh.coord_of(rank);
        mesh.axes().all(|it| grid.copies.contains(it) || coord[it.0 as usize] == at[it.0 as usize])
    };
    chosen.iter().any(|&it| same(it))
}

fn notes(grid: &Grid, chosen: &[u64]) -> String {
    let mut res = String::new();
    let mut note = |text: String| res.push_str(&format!("  {text}\n"));
    if !chosen.is_empty() {
        let who = if chosen.len() == 1 { "rank" } else { "ranks" };
        note(format!("* held by {who} {}", ranges(chosen)));
    }
    if grid.n_empty > 0 {
        let holds = if grid.n_empty == 1 { "holds" } else { "hold" };
        note(format!("{} {holds} nothing", plural(grid.n_empty, "rank")));
    }
    for dim in &grid.others {
        note(format!("dim {dim} is cut too; drawn is its first piece"));
    }
    let sides = grid.bands.iter().zip(grid.dims);
    for (bands, dim) in sides {
        let left_out = |it: &Band| match it {
            Band::Folded { n, .. } => *n as u64,
            Band::Piece(_) => 0,
        };
        let n: u64 = bands.iter().map(left_out).sum();
        if let (Some(dim), 1..) = (dim, n) {
            let all = n + bands.iter().filter(|it| matches!(it, Band::Piece(_))).count() as u64;
            note(format!("{} of {} pieces of dim {dim} are folded", grouped(n), grouped(all)));
        }
    }
    res
}

#[cfg(test)]
mod tests {
    use ir::placement::Sharding;

    use super::*;

    #[track_caller]
    fn check(axes: &[(&str, u32)], sharding: &str, shape: &[u64], chosen: &[u64], expect: &str) {
        let mesh = Mesh::new(axes);
        let sharding = Sharding::parse(sharding, &mesh).unwrap();
        let subject = Subject { sharding: &sharding, shape, element: 4 };
        let style = Style { lines: false, colors: false, width: 60 };
        let found = drawing(&subject, &mesh, &mut Cuts::default(), chosen, style);
        assert_eq!(found, expect.strip_prefix('\n').unwrap());
        assert!(found.lines().all(|it| it.len() <= 60), "{found}");
    }

    #[test]
    fn replicas_share_a_box() {
        check(
            &[("dp", 2), ("tp", 2)],
            "[tp, _]",
            &[4, 8],
            &[],
            "
          [0,8)
        +-------+
  [0,2) | 0, 2  |
        +-------+
  [2,4) | 1, 3  |
        +-------+
",
        );
    }

    #[test]
    fn strided_shards_are_several_boxes_and_chosen_ranks_are_marked() {
        check(
            &[("dp", 2), ("tp", 2)],
            "[x2.dp, tp]",
            &[6, 8],
            &[3],
            "
          [0,4)   [4,8)
        +-------+-------+
  [0,2) | 0     | 1     |
        +-------+-------+
  [2,3) | 2     | *3    |
        +-------+-------+
  [3,5) | 0     | 1     |
        +-------+-------+
  [5,6) | 2     | *3    |
        +-------+-------+
  * held by rank 3
",
        );
    }

    #[test]
    fn empty_shards_are_counted() {
        check(
            &[("dp", 8)],
            "[dp]",
            &[5],
            &[],
            "
     [0,1)   [1,2)   [2,3)   [3,4)   [4,5)
   +-------+-------+-------+-------+-------+
   | 0     | 1     | 2     | 3     | 4     |
   +-------+-------+-------+-------+-------+
  3 ranks hold nothing
",
        );
    }

    #[test]
    fn many_ranks_are_folded_to_the_width() {
        check(
            &[("dp", 2048), ("tp", 8)],
            "[_, dp]",
            &[16, 4096],
            &[],
            "
           [0,2)   [2,4)   2,045 more   [4094,4096)
         +-------+-------+------------+-------------+
  [0,16) | 0-7   | 8-15  |     ..     | 16376-16383 |
         +-------+-------+------------+-------------+
  2,045 of 2,048 pieces of dim 1 are folded
",
        );
    }
}
