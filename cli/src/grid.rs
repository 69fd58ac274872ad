//! `Grid`: which ranks hold which box of a tensor, as rows and columns that fit on a screen.
//!
//! A dimension that is cut makes rows or columns; each is a range of indices and the coordinates that hold
//! it. A strided shard is several of them. What does not fit is one folded row or column that says how many
//! it stands for.
//!
//! ```text
//! f32[6, 4] @ [x2.dp, tp] on (dp=2, tp=2)
//!          [0,2)  [2,4)
//! [0,2)     0      1
//! [2,3)     2      3
//! [3,5)     0      1
//! [5,6)     2      3
//! ```

use std::collections::BTreeMap;

use ir::placement::{Axis, AxisSet, DimLayout, Mesh, Sharding};

/// Coordinates over one dimension that are walked at most; a drawing of more says nothing.
const WALKED: u64 = 1 << 16;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// The tensor's dimensions that are drawn downwards and across.
    pub dims: [Option<usize>; 2],
    /// Rows and columns.
    pub bands: [Vec<Band>; 2],
    /// Dimensions that are cut too and not drawn: what is shown is their first piece.
    pub others: Vec<usize>,
    /// Axes along which every rank holds the same box: a copy of its elements, or a part of their sum.
    pub copies: AxisSet,
    /// How many ranks hold nothing.
    pub n_empty: u64,
    /// Bytes of an element.
    element: u64,
    shape: Vec<u64>,
    /// Ranges of dimensions that are not drawn, and who holds them.
    fixed: Vec<(usize, Piece)>,
    /// Holders of the dimension that is drawn across.
    n_across: usize,
}

/// A row or a column.
#[derive(Debug, Clone, PartialEq)]
pub enum Band {
    /// A range of indices.
    Piece(Piece),
    /// Ranges that were left out.
    Folded {
        /// How many.
        n: usize,
        /// The indices from the first to the last.
        range: [u64; 2],
    },
}

/// A range of indices of a dimension, and the coordinates that hold it.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// Start and end.
    pub range: [u64; 2],
    /// The number of the holder among all of the dimension, which colours it.
    pub holder: usize,
    /// The index along each axis that cuts the dimension.
    pub coord: Vec<(Axis, u32)>,
}

/// A box, and who holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// The first few ranks.
    pub ranks: Vec<u64>,
    /// How many ranks hold it.
    pub n_ranks: u64,
    /// Index ranges of all dimensions.
    pub ranges: Vec<[u64; 2]>,
    /// What it takes.
    pub bytes: u64,
    /// Tells holders apart: all up to 8, of more those next to each other.
    pub color: usize,
}

/// How dimensions are cut; the same cut is walked once.
#[derive(Debug, Default)]
pub struct Cuts(BTreeMap<(DimLayout, u64), Cut>);

#[derive(Debug, Clone)]
struct Cut {
    /// In ascending order.
    pieces: Vec<Piece>,
    /// Coordinates that hold nothing.
    n_empty: u64,
}

/// How much of a grid there is room for.
#[derive(Debug, Clone, Copy)]
pub struct Room<'a> {
    /// Rows and columns at most.
    pub bands: [usize; 2],
    /// Ranks whose boxes are not folded away.
    pub chosen: &'a [u64],
}

/// Ranks of a cell that are listed.
const LISTED: usize = 16;

impl Grid {
    /// The grid of a tensor with elements of `element` bytes; `None` if a dimension has too many pieces to
    /// look at.
    pub fn of(
        sharding: &Sharding,
        shape: &[u64],
        element: u64,
        mesh: &Mesh,
        cuts: &mut Cuts,
        room: Room,
    ) -> Option<Grid> {
        let cut: Vec<usize> =
            (0..shape.len()).filter(|&it| !sharding.dims[it].is_whole()).collect();
        let dims = drawn(shape.len(), &cut);
        let mut nonempty = 1;
        let mut fixed = Vec::new();
        let mut n_across = 1;
        let mut bands = [vec![Band::whole(1)], vec![Band::whole(1)]];
        for (dim, layout) in sharding.dims.iter().enumerate() {
            let cut = cuts.of(layout, shape[dim], mesh)?;
            nonempty *= mesh.set_size(layout.axis_set()) - cut.n_empty;
            match dims.iter().position(|it| *it == Some(dim)) {
                Some(side) => {
                    if side == 1 {
                        n_across = cut.pieces.iter().map(|it| it.holder + 1).max().unwrap_or(1);
                    }
                    let wanted = chosen(&cut.pieces, mesh, room.chosen);
                    bands[side] = folded(&cut.pieces, room.bands[side], &wanted);
                }
                None => fixed.extend(cut.pieces.first().map(|it| (dim, it.clone()))),
            }
        }
        let copies = mesh.all().minus(sharding.sharded_axes());
        Some(Grid {
            dims,
            bands,
            others: cut.into_iter().filter(|&it| !dims.contains(&Some(it))).collect(),
            copies,
            n_empty: mesh.n_ranks() - nonempty * mesh.set_size(copies),
            element,
            shape: shape.to_vec(),
            fixed,
            n_across,
        })
    }

    /// Below 8.
    fn color(&self, down: usize, across: usize) -> usize {
        let shift = if self.n_across.is_multiple_of(8) { down } else { 0 };
        (down * self.n_across + across + shift) % 8
    }

    /// The box at a row and a column; `None` where one is folded.
    pub fn cell(&self, mesh: &Mesh, row: usize, column: usize) -> Option<Cell> {
        let [Band::Piece(down), Band::Piece(across)] =
            [self.bands[0].get(row)?, self.bands[1].get(column)?]
        else {
            return None;
        };
        let mut coord = mesh.coord_of(0);
        let held = [down, across].into_iter().chain(self.fixed.iter().map(|it| &it.1));
        for &(axis, index) in held.flat_map(|it| &it.coord) {
            coord[axis.0 as usize] = index;
        }
        let ranges: Vec<[u64; 2]> = (0..self.shape.len())
            .map(|dim| match self.dims.iter().position(|it| *it == Some(dim)) {
                Some(0) => down.range,
                Some(_) => across.range,
                None => self.fixed.iter().find(|it| it.0 == dim).map_or([0, 0], |it| it.1.range),
            })
            .collect();
        Some(Cell {
            ranks: mesh
                .group_of(self.copies, &coord)
                .map(|it| mesh.rank_of(&it))
                .take(LISTED)
                .collect(),
            n_ranks: mesh.set_size(self.copies),
            bytes: ranges.iter().map(|[a, b]| b - a).product::<u64>() * self.element,
            ranges,
            color: self.color(down.holder, across.holder),
        })
    }
}

impl Band {
    fn whole(size: u64) -> Band {
        Band::Piece(Piece { range: [0, size], holder: 0, coord: Vec::new() })
    }
}

impl Cuts {
    fn of(&mut self, layout: &DimLayout, size: u64, mesh: &Mesh) -> Option<&Cut> {
        if mesh.set_size(layout.axis_set()) > WALKED {
            return None;
        }
        let cut = || Cut::of(layout, size, mesh);
        Some(self.0.entry((layout.clone(), size)).or_insert_with(cut))
    }
}

impl Cut {
    fn of(layout: &DimLayout, size: u64, mesh: &Mesh) -> Cut {
        let axes = layout.axis_set();
        let mut res = Cut { pieces: Vec::new(), n_empty: 0 };
        for coord in mesh.group_of(axes, &mesh.coord_of(0)) {
            let runs = layout.runs(size, mesh, &coord);
            res.n_empty += u64::from(runs.is_empty());
            let coord: Vec<(Axis, u32)> =
                axes.iter().map(|it| (it, coord[it.0 as usize])).collect();
            let pieces = runs.iter().map(|&(start, len)| Piece {
                range: [start, start + len],
                holder: 0,
                coord: coord.clone(),
            });
            res.pieces.extend(pieces);
        }
        res.pieces.sort_by_key(|it| it.range[0]);
        let mut holders: BTreeMap<Vec<(Axis, u32)>, usize> = BTreeMap::new();
        for piece in &mut res.pieces {
            let next = holders.len();
            piece.holder = *holders.entry(piece.coord.clone()).or_insert(next);
        }
        res
    }
}

/// A vector lies across; else the first two dimensions that are cut are drawn, or what there is.
fn drawn(ndim: usize, cut: &[usize]) -> [Option<usize>; 2] {
    match (ndim, cut) {
        (0, _) => [None, None],
        (1, _) => [None, Some(0)],
        (_, [a, b, ..]) => [Some(*a), Some(*b)],
        (_, [a]) if *a + 1 == ndim => [Some(ndim - 2), Some(*a)],
        (_, [a]) => [Some(*a), Some(ndim - 1)],
        (_, []) => [Some(ndim - 2), Some(ndim - 1)],
    }
}

/// The pieces that one of these ranks holds.
fn chosen(pieces: &[Piece], mesh: &Mesh, ranks: &[u64]) -> Vec<usize> {
    let coords: Vec<_> = ranks.iter().map(|&it| mesh.coord_of(it)).collect();
    let holds = |piece: &Piece| {
        let at = |coord: &[u32]| piece.coord.iter().all(|it| coord[it.0.0 as usize] == it.1);
        coords.iter().any(|it| at(it))
    };
    (0..pieces.len()).filter(|&it| holds(&pieces[it])).collect()
}

/// At most `room` bands, 3 or more: those that are wanted, the last, the first ones, and what was left out.
fn folded(pieces: &[Piece], room: usize, wanted: &[usize]) -> Vec<Band> {
    let n = pieces.len();
    let mut keep = vec![n <= room; n];
    if n > room {
        let gaps = |keep: &[bool]| keep.split(|it| *it).filter(|it| !it.is_empty()).count();
        let bands = |keep: &[bool]| keep.iter().filter(|it| **it).count() + gaps(keep);
        let mut fits = |index: usize| {
            let before = keep[index];
            keep[index] = true;
            let fits = bands(&keep) <= room;
            keep[index] = before || fits;
            fits
        };
        for &index in wanted.iter().take(room).chain(&[n - 1]) {
            fits(index);
        }
        let _ = (0..n).all(&mut fits);
    }
    let mut res = Vec::new();
    for (piece, keep) in pieces.iter().zip(keep) {
        match res.last_mut() {
            _ if keep => res.push(Band::Piece(piece.clone())),
            Some(Band::Folded { n, range }) => {
                *n += 1;
                range[1] = piece.range[1];
            }
            Some(Band::Piece(_)) | None => res.push(Band::Folded { n: 1, range: piece.range }),
        }
    }
    if res.is_empty() {
        res.push(Band::Piece(Piece { range: [0, 0], holder: 0, coord: Vec::new() }));
    }
    res
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh() -> Mesh {
        Mesh::new(&[("dp", 2), ("tp", 4)])
    }

    fn grid(sharding: &str, shape: &[u64], mesh: &Mesh, rows: usize, chosen: &[u64]) -> Grid {
        let sharding = Sharding::parse(sharding, mesh).unwrap();
        let room = Room { bands: [rows, 8], chosen };
        Grid::of(&sharding, shape, 4, mesh, &mut Cuts::default(), room).unwrap()
    }

    /// Ranks of all cells, row by row, with the range of each row.
    #[track_caller]
    fn check(sharding: &str, shape: &[u64], expect: &[(&str, &[&[u64]])], n_empty: u64) {
        let mesh = mesh();
        let grid = grid(sharding, shape, &mesh, 8, &[]);
        let rows = grid.bands[0].iter().enumerate().map(|(row, band)| {
            let Band::Piece(piece) = band else { panic!("it fits") };
            let cells = (0..grid.bands[1].len()).map(|it| grid.cell(&mesh, row, it).unwrap().ranks);
            (format!("{}-{}", piece.range[0], piece.range[1]), cells.collect::<Vec<_>>())
        });
        let expect: Vec<(String, Vec<Vec<u64>>)> = expect
            .iter()
            .map(|(range, cells)| (range.to_string(), cells.iter().map(|it| it.to_vec()).collect()))
            .collect();
        assert_eq!(rows.collect::<Vec<_>>(), expect);
        assert_eq!(grid.n_empty, n_empty);
    }

    #[test]
    fn copies_share_a_box() {
        check(
            "[tp, _]",
            &[8, 4],
            &[("0-2", &[&[0, 4]]), ("2-4", &[&[1, 5]]), ("4-6", &[&[2, 6]]), ("6-8", &[&[3, 7]])],
            0,
        );
    }

    #[test]
    fn both_dims_are_drawn() {
        let cells: [&[&[u64]]; 2] = [&[&[0], &[1], &[2], &[3]], &[&[4], &[5], &[6], &[7]]];
        check("[dp, tp]", &[4, 4], &[("0-2", cells[0]), ("2-4", cells[1])], 0);
    }

    #[test]
    fn a_strided_shard_is_several_boxes() {
        let all: [&[u64]; 2] = [&[0, 1, 2, 3], &[4, 5, 6, 7]];
        let rows: [&[&[u64]]; 4] = [&[all[0]], &[all[1]], &[all[0]], &[all[1]]];
        check(
            "[x2.dp, _]",
            &[6, 4],
            &[("0-2", rows[0]), ("2-3", rows[1]), ("3-5", rows[2]), ("5-6", rows[3])],
            0,
        );
    }

    #[test]
    fn uneven_and_empty_shards() {
        // 5 rows over 8: two for each of the first, none for the last.
        check(
            "[tp.dp, _]",
            &[5, 4],
            &[
                ("0-1", &[&[0]]),
                ("1-2", &[&[4]]),
                ("2-3", &[&[1]]),
                ("3-4", &[&[5]]),
                ("4-5", &[&[2]]),
            ],
            3,
        );
    }

    #[test]
    fn what_does_not_fit_is_folded_and_chosen_ranks_are_not() {
        let mesh = Mesh::new(&[("dp", 2048), ("tp", 8)]);
        let grid = grid("[dp, _]", &[4096, 4], &mesh, 7, &[8 * 1000 + 3]);
        let rows: Vec<String> = grid.bands[0]
            .iter()
            .map(|it| match it {
                Band::Piece(it) => format!("{:?}", it.range),
                Band::Folded { n, range } => format!("{n} in {range:?}"),
            })
            .collect();
        let expect = [
            "[0, 2]",
            "[2, 4]",
            "[4, 6]",
            "997 in [6, 2000]",
            "[2000, 2002]",
            "1046 in [2002, 4094]",
            "[4094, 4096]",
        ];
        assert_eq!(rows, expect);
        let cell = grid.cell(&mesh, 4, 0).unwrap();
        assert_eq!((cell.ranks[3], cell.n_ranks, cell.bytes), (8003, 8, 2 * 4 * 4));
    }
}
