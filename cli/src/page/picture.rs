//! A [`Grid`] as an SVG picture: boxes to scale, with who holds them.

use ir::placement::Mesh;
use maud::{Markup, html};

use crate::grid::{Band, Cell, Grid};
use crate::table::{bytes, grouped};
use crate::words::numbers;

/// Rows and columns that a picture shows at most, and if columns are left out, whose labels are long.
pub const BANDS: [[usize; 2]; 2] = [[8, 8], [8, 5]];

/// Pixels of a picture across, labels of rows included.
const WIDTH: f64 = 330.0;
/// Pixels of a character of a label.
const CHAR: f64 = 5.5;
/// Pixels of what is folded, downwards and across.
const FOLDED: [f64; 2] = [16.0, 60.0];

/// The picture; `id` starts the ids of its boxes.
pub fn picture(grid: &Grid, mesh: &Mesh, id: &str, title: &str) -> Markup {
    let labels = [0, 1].map(|side: usize| -> Vec<String> {
        grid.bands[side].iter().map(|it| label(it, grid.dims[side])).collect()
    });
    let longest = labels[0].iter().map(|it| it.chars().count()).max().unwrap_or(0);
    let left = if longest == 0 { 1.0 } else { longest as f64 * CHAR + 6.0 };
    let top = if grid.dims[1].is_some() { 14.0 } else { 1.0 };
    let rows = grid.bands[0].len() as f64;
    let height = if grid.dims[0].is_none() { 26.0 } else { (rows * 17.0).max(60.0) };
    let down = spread(&grid.bands[0], height, FOLDED[0], 13.0);
    let across = spread(&grid.bands[1], WIDTH - left - 1.0, FOLDED[1], 20.0);
    let total = top + down.last().map_or(0.0, |it| it.0 + it.1) + 1.0;
    let mut first = true;
    html! {
        svg.picture viewBox=(format!("0 0 {WIDTH} {total:.0}")) width=(WIDTH) height=(format!("{total:.0}"))
            role="group" aria-label=(title) {
            @for (text, (at, len)) in labels[1].iter().zip(&across) {
                @let start = text.split(':').next().unwrap_or_default();
                @if let Some(text) = [text.as_str(), start].into_iter().find(|it| fits(it, *len + 3.0)) {
                    text.axis x=(px(left + at + len / 2.0)) y="10" text-anchor="middle" { (text) }
                }
            }
            @for (row, (text, (y, h))) in labels[0].iter().zip(&down).enumerate() {
                text.axis x=(px(left - 4.0)) y=(px(top + y + h / 2.0 + 3.0)) text-anchor="end" { (text) }
                @for (column, (x, w)) in across.iter().enumerate() {
                    @if let Some(cell) = grid.cell(mesh, row, column) {
                        (boxed(&cell, &format!("{id}-{row}-{column}"), (row, column), std::mem::take(&mut first),
                            [left + x, top + y, *w, *h]))
                    } @else {
                        rect.folded x=(px(left + x)) y=(px(top + y)) width=(px(*w)) height=(px(*h)) {}
                    }
                }
            }
        }
    }
}

/// One box; the first of a picture can be reached with Tab, others with arrows.
fn boxed(cell: &Cell, id: &str, at: (usize, usize), first: bool, [x, y, w, h]: [f64; 4]) -> Markup {
    let ranks = ranks(cell);
    let what = format!("{} {ranks}", if cell.n_ranks == 1 { "rank" } else { "ranks" });
    let held = ranges(cell);
    let short = match cell.n_ranks {
        n if n as usize == cell.ranks.len() => numbers(&cell.ranks),
        n => format!("{}… ({})", cell.ranks[0], grouped(n)),
    };
    html! {
        g.cell id=(id) tabindex=(if first { "0" } else { "-1" }) role="img"
            aria-label=(format!("{what}: {held}, {}", bytes(cell.bytes)))
            data-row=(at.0) data-column=(at.1) data-ranks=(ranks) data-n=(cell.n_ranks) data-box=(held)
            data-bytes=(cell.bytes) {
            rect class=(format!("k{}", cell.color)) x=(px(x)) y=(px(y)) width=(px(w)) height=(px(h)) {}
            @if h >= 11.0 && fits(&short, w) {
                text x=(px(x + w / 2.0)) y=(px(y + h / 2.0 + 3.2)) text-anchor="middle" { (short) }
            }
        }
    }
}

/// `[0,4) × [0,64)`.
pub fn ranges(cell: &Cell) -> String {
    let ranges: Vec<String> = cell.ranges.iter().map(|[a, b]| format!("[{a},{b})")).collect();
    if ranges.is_empty() { "the number".to_string() } else { ranges.join(" × ") }
}

/// `0, 8, 16, .. (2,048 ranks)`.
fn ranks(cell: &Cell) -> String {
    match cell.n_ranks as usize - cell.ranks.len() {
        0 => numbers(&cell.ranks),
        more => format!(
            "{} and {} more",
            numbers(&cell.ranks[..4]),
            grouped(more as u64 + cell.ranks.len() as u64 - 4)
        ),
    }
}

fn label(band: &Band, dim: Option<usize>) -> String {
    match (band, dim) {
        (_, None) => String::new(),
        (Band::Piece(it), Some(_)) => format!("{}:{}", it.range[0], it.range[1]),
        (Band::Folded { n, .. }, Some(_)) => format!("{} more", grouped(*n as u64)),
    }
}

/// Where bands start and how long they are: pieces to scale, in what folded ones leave.
fn spread(bands: &[Band], room: f64, folded: f64, least: f64) -> Vec<(f64, f64)> {
    let len = |it: &Band| match it {
        Band::Piece(it) => Some((it.range[1] - it.range[0]) as f64),
        Band::Folded { .. } => None,
    };
    let n_folded = bands.iter().filter(|it| len(it).is_none()).count() as f64;
    let pieces: Vec<f64> = bands.iter().filter_map(len).collect();
    let total: f64 = pieces.iter().sum::<f64>().max(1.0);
    // Every piece has a little, and its share of the rest.
    let least = least.min((room - n_folded * folded) / pieces.len().max(1) as f64).max(1.0);
    let rest = (room - n_folded * folded - least * pieces.len() as f64).max(0.0);
    let smallest = pieces.iter().copied().fold(f64::MAX, f64::min);
    let scaled = (room - n_folded * folded) * smallest / total >= least;
    let mut at = 0.0;
    let mut res = Vec::new();
    for band in bands {
        let this = match len(band) {
            None => folded,
            Some(it) if scaled => (room - n_folded * folded) * it / total,
            Some(it) => least + rest * it / total,
        };
        res.push((at, this));
        at += this;
    }
    res
}

fn fits(text: &str, width: f64) -> bool {
    text.chars().count() as f64 * CHAR + 3.0 <= width
}

/// A coordinate with at most one decimal.
pub fn px(it: f64) -> String {
    let text = format!("{it:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_string)
}
