//! How one dimension is cut: a list of digits, major to minor.
//!
//! Digits read as cuts of a range. Sub-axes of one axis of the user's mesh, next to each other and
//! in order, are *one* cut, so that refining a mesh moves no element:
//!
//! ```text
//! 250 rows over tp=4, as [tp] or as [tp_kv.tp_rep]  ->  63 63 63 61
//! ```
//!
//! A granule keeps numbers together that must not be parted, such as a block that has one scale:
//!
//! ```text
//! 1280 rows over dp=4, as [dp]      ->  320 320 320 320
//! 1280 rows over dp=4, as [dp%128]  ->  384 384 384 128
//! ```

use smallvec::SmallVec;

use super::mesh::{Axis, AxisSet, Mesh};

/// One digit of a dimension that is read as a mixed-radix number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Digit {
    /// Fixed by the mesh coordinate along this axis.
    Axis(Axis),
    /// This many pieces, all of them kept, next to each other.
    Block(u32),
}

/// The digits of one dimension, major to minor; what they leave over is local.
///
/// Always normal: no block of 1, no two blocks next to each other, no block at the end, and no
/// granule where nothing is cut. One that rounds nothing for the size at hand is another layout all the
/// same: who knows the size leaves it out.
///
/// A block at the end would keep all that is there, so that is where the granule is stored: there is a
/// layout for each dimension of each value, and few have granules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DimLayout(SmallVec<[Digit; 2]>);

/// A contiguous range of global indices: its start and its length.
pub type Run = (u64, u64);

/// The runs that one coordinate holds, in ascending order.
pub type Runs = SmallVec<[Run; 2]>;

/// One cut of a range: a block, or an axis, or the adjacent parts of a refined axis.
struct Cut<'a> {
    digits: &'a [Digit],
    width: u64,
    granule: u64,
}

impl Cut<'_> {
    /// Which piece the coordinate takes; `None` if it takes them all.
    fn index(&self, mesh: &Mesh, coord: &[u32]) -> Option<u64> {
        self.digits.iter().try_fold(0, |res, digit| match *digit {
            Digit::Axis(axis) => {
                Some(res * u64::from(mesh.size(axis)) + u64::from(coord[axis.0 as usize]))
            }
            Digit::Block(_) => None,
        })
    }

    /// The piece `index` of the range `0..len`.
    fn piece(&self, len: u64, index: u64) -> Run {
        let piece = self.size(len);
        let start = len.min(index * piece);
        (start, piece.min(len - start))
    }

    /// How long a full piece of `0..len` is.
    fn size(&self, len: u64) -> u64 {
        len.div_ceil(self.width).next_multiple_of(self.granule)
    }

    /// The pieces of `0..len`: length and number of the full ones, length of the last.
    fn pieces(&self, len: u64) -> ((u64, u64), u64) {
        match self.size(len) {
            0 => ((0, 0), 0),
            piece => ((piece, len / piece), len % piece),
        }
    }
}

impl DimLayout {
    /// Not cut.
    pub fn whole() -> DimLayout {
        DimLayout::default()
    }

    /// The layout of these digits, made normal.
    pub fn new(digits: impl IntoIterator<Item = Digit>) -> DimLayout {
        let mut res: SmallVec<[Digit; 2]> = SmallVec::new();
        for digit in digits {
            match (res.last_mut(), digit) {
                (_, Digit::Block(1)) => (),
                (Some(Digit::Block(a)), Digit::Block(b)) => *a = a.saturating_mul(b),
                _ => res.push(digit),
            }
        }
        while let Some(Digit::Block(_)) = res.last() {
            res.pop();
        }
        DimLayout(res)
    }

    /// The layout cut over these axes, major to minor.
    pub fn over(axes: impl IntoIterator<Item = Axis>) -> DimLayout {
        DimLayout(axes.into_iter().map(Digit::Axis).collect())
    }

    /// The same digits, whose pieces are multiples of `granule` from here on; it must divide the
    /// dimension.
    ///
    /// # Panics
    ///
    /// If it is 0.
    #[must_use]
    pub fn in_granules(mut self, granule: u32) -> DimLayout {
        assert!(granule > 0, "a granule has a size");
        if let Some(Digit::Block(_)) = self.0.last() {
            self.0.pop();
        }
        if granule > 1 && !self.is_whole() {
            self.0.push(Digit::Block(granule));
        }
        self
    }

    /// Pieces are rounded up to a multiple of this; 1 if they are not rounded.
    pub fn granule(&self) -> u32 {
        match self.0.last() {
            Some(&Digit::Block(granule)) => granule,
            Some(Digit::Axis(_)) | None => 1,
        }
    }

    /// The digits, major to minor.
    pub fn digits(&self) -> &[Digit] {
        match self.0.split_last() {
            Some((Digit::Block(_), digits)) => digits,
            Some((Digit::Axis(_), _)) | None => &self.0,
        }
    }

    /// Whether nothing cuts it.
    pub fn is_whole(&self) -> bool {
        self.0.is_empty()
    }

    /// The axes that cut it, in digit order.
    pub fn axes(&self) -> impl DoubleEndedIterator<Item = Axis> + '_ {
        self.digits().iter().filter_map(|it| match *it {
            Digit::Axis(axis) => Some(axis),
            Digit::Block(_) => None,
        })
    }

    /// The axes that cut it, as a set.
    pub fn axis_set(&self) -> AxisSet {
        self.axes().collect()
    }

    /// Whether every coordinate holds one contiguous range: it has no blocks.
    pub fn is_contiguous(&self) -> bool {
        self.digits().iter().all(|it| matches!(it, Digit::Axis(_)))
    }

    /// Whether every cut of a dimension of `size` gives equal pieces, of whole granules.
    pub fn divides(&self, size: u64, mesh: &Mesh) -> bool {
        let mut rest = size / self.unit();
        size.is_multiple_of(self.unit())
            && self.digits().iter().all(|&digit| {
                let even = rest.is_multiple_of(width(digit, mesh));
                rest /= width(digit, mesh).max(1);
                even
            })
    }

    /// The most that any coordinate holds of a dimension of `size`.
    pub fn local_size(&self, size: u64, mesh: &Mesh) -> u64 {
        if self.is_contiguous() {
            return self.cuts(mesh).fold(size, |rest, it| it.size(rest).min(rest));
        }
        if self.divides(size, mesh) {
            return size / self.axes().map(|it| u64::from(mesh.size(it))).product::<u64>();
        }
        let cuts: SmallVec<[Cut<'_>; 4]> = self.cuts(mesh).collect();
        largest(&cuts, &[(size, 1)])
    }

    /// How much the coordinate holds of a dimension of `size`.
    pub fn extent(&self, size: u64, mesh: &Mesh, coord: &[u32]) -> u64 {
        let cuts: SmallVec<[Cut<'_>; 4]> = self.cuts(mesh).collect();
        extent(&cuts, size, mesh, coord)
    }

    /// The first global index that the coordinate holds; `size` if it holds none.
    pub fn start(&self, size: u64, mesh: &Mesh, coord: &[u32]) -> u64 {
        self.runs(size, mesh, coord).first().map_or(size, |&(start, _)| start)
    }

    /// The ranges that the coordinate holds, in local order, which is also ascending. None is
    /// empty and no two touch.
    pub fn runs(&self, size: u64, mesh: &Mesh, coord: &[u32]) -> Runs {
        let mut res = Runs::from_slice(&[(0, size)]);
        for cut in self.cuts(mesh) {
            res = match cut.index(mesh, coord) {
                Some(index) => res
                    .iter()
                    .map(|&(start, len)| {
                        let (offset, len) = cut.piece(len, index);
                        (start + offset, len)
                    })
                    .collect(),
                None => res
                    .iter()
                    .flat_map(|&(start, len)| {
                        let pieces = (0..cut.width).map(|it| cut.piece(len, it));
                        pieces
                            .take_while(|&(_, len)| len > 0)
                            .map(move |(offset, len)| (start + offset, len))
                            .collect::<Runs>()
                    })
                    .collect(),
            };
        }
        merged(res)
    }

    /// The layout of the dimension that `(a b ..)` in einops notation makes of these dimensions.
    ///
    /// One of them may be cut unevenly if those behind it are whole, which are a granule then, and
    /// one index is held of those in front. `None` where what is held is no array of the dimensions.
    pub fn join(parts: &[(DimLayout, u64)], mesh: &Mesh) -> Option<DimLayout> {
        if parts.iter().all(|(layout, _)| layout.is_whole()) {
            return Some(DimLayout::whole());
        }
        // Next to dimensions of 1, uneven cuts stay what they are.
        if let Some(at) = only_one(parts.iter().map(|&(_, size)| size)) {
            let others = parts.iter().enumerate().filter(|&(i, _)| i != at);
            if others.flat_map(|(_, it)| it.0.axes()).all(|it| mesh.size(it) == 1) {
                let all = DimLayout::new(parts.iter().enumerate().flat_map(|(i, (layout, _))| {
                    let keep = move |it: &&Digit| i == at || matches!(it, Digit::Axis(_));
                    layout.digits().iter().filter(keep).copied()
                }));
                return Some(all.in_granules(parts[at].0.granule()));
            }
        }
        let mut digits: SmallVec<[Digit; 8]> = SmallVec::new();
        for (i, (layout, size)) in parts.iter().enumerate() {
            if *size == 0 {
                return None;
            }
            if !layout.divides(*size, mesh) {
                let behind = &parts[i + 1..];
                let inner: u64 = behind.iter().map(|it| it.1).product();
                let whole = behind.iter().all(|it| it.0.is_whole()) && inner > 0;
                let nests =
                    fixed(&digits) && !one_cut(digits.last(), layout.digits().first(), mesh);
                let granule = u32::try_from(layout.unit().checked_mul(inner)?).ok()?;
                digits.extend(layout.digits().iter().copied());
                return (whole && nests).then(|| DimLayout::new(digits).in_granules(granule));
            }
            let width: u64 = layout.digits().iter().map(|&it| width(it, mesh)).product();
            digits.extend(layout.digits().iter().copied());
            match u32::try_from(size / width).ok()? {
                1 => (),
                n => digits.push(Digit::Block(n)),
            }
        }
        Some(DimLayout::new(digits))
    }

    /// Inverse of [`DimLayout::join`]: the layouts of the factors of a dimension, major to minor.
    ///
    /// `None` where a digit straddles two factors, and where an uneven cut is behind a dimension of which
    /// several indices are held, or in front of one that is no part of a granule.
    pub fn split(&self, factors: &[u64], mesh: &Mesh) -> Option<SmallVec<[DimLayout; 4]>> {
        let mut res: SmallVec<[DimLayout; 4]> =
            factors.iter().map(|_| DimLayout::whole()).collect();
        if self.is_whole() {
            return Some(res);
        }
        if let Some(at) = only_one(factors.iter().copied()) {
            res[at] = self.clone();
            return Some(res);
        }
        let size = factors.iter().try_fold(1_u64, |res, &it| res.checked_mul(it))?;
        // An uneven cut is in the last factor that is no part of a granule.
        let even = self.divides(size, mesh);
        let (mut inner, mut n) = (1, factors.len().checked_sub(1)?);
        while n > 0 && self.unit().is_multiple_of(inner * factors[n]) {
            inner *= factors[n];
            n -= 1;
        }
        let mut digits: SmallVec<[Digit; 8]> = self.digits().iter().rev().copied().collect();
        let n_cut = if even { factors.len() } else { n };
        let mut front: SmallVec<[Digit; 4]> = SmallVec::new();
        for (factor, part) in factors[..n_cut].iter().zip(&mut res) {
            let mut room = *factor;
            let mut taken: SmallVec<[Digit; 4]> = SmallVec::new();
            while room > 1 {
                let Some(digit) = digits.pop() else { break };
                let width = width(digit, mesh);
                if room.is_multiple_of(width) {
                    room /= width;
                    taken.push(digit);
                    continue;
                }
                // A block may be shared out between two factors; an axis may not.
                if matches!(digit, Digit::Axis(_)) || !width.is_multiple_of(room) {
                    return None;
                }
                taken.push(Digit::Block(u32::try_from(room).ok()?));
                digits.push(Digit::Block(u32::try_from(width / room).ok()?));
                room = 1;
            }
            front.extend(taken.iter().copied());
            *part = DimLayout::new(taken);
        }
        if !even {
            let granule = self.unit() / inner;
            let nests = fixed(&front) && !one_cut(front.last(), digits.last(), mesh);
            let part = DimLayout::new(digits.into_iter().rev());
            res[n] = part.in_granules(u32::try_from(granule).ok()?);
            return (nests && factors[n].is_multiple_of(granule)).then_some(res);
        }
        // Axes of size 1 cut nothing, so the last factor can take them.
        let last = res.last_mut()?;
        if digits.iter().any(|&it| width(it, mesh) > 1) {
            return None;
        }
        *last = DimLayout::new(last.digits().iter().copied().chain(digits.into_iter().rev()));
        Some(res)
    }

    /// The first `n` digits, as they cut a dimension of `size`.
    pub(super) fn prefix(&self, n: usize, size: u64, mesh: &Mesh) -> DimLayout {
        let even = DimLayout::new(self.digits()[..n].iter().copied());
        let rounded = even.clone().in_granules(self.granule());
        if rounded.divides(size, mesh) { even } else { rounded }
    }

    /// These digits, then `digits`.
    pub(super) fn then(&self, digits: impl IntoIterator<Item = Digit>) -> DimLayout {
        DimLayout::new(self.digits().iter().copied().chain(digits)).in_granules(self.granule())
    }

    /// The same without the digits of `axes`: what a gather over them gives.
    pub(super) fn without(&self, axes: AxisSet) -> DimLayout {
        let cuts = |it: &&Digit| !matches!(it, Digit::Axis(axis) if axes.contains(*axis));
        DimLayout::new(self.digits().iter().filter(cuts).copied()).in_granules(self.granule())
    }

    /// Whether the first `n` digits name ranges that the others cut further, for this size.
    ///
    /// Not so only inside a refined axis that cuts unevenly: that is one cut.
    pub(super) fn nests_at(&self, n: usize, size: u64, mesh: &Mesh) -> bool {
        let (Some(&Digit::Axis(major)), Some(&Digit::Axis(minor))) =
            (n.checked_sub(1).and_then(|it| self.digits().get(it)), self.digits().get(n))
        else {
            return true;
        };
        !mesh.continues(major, minor) || self.divides(size, mesh)
    }

    fn unit(&self) -> u64 {
        u64::from(self.granule())
    }

    fn cuts<'a>(&'a self, mesh: &'a Mesh) -> impl Iterator<Item = Cut<'a>> {
        let granule = self.unit();
        let cut = move |digits| Cut { digits, width: product(digits, mesh).max(1), granule };
        self.digits().chunk_by(move |a, b| one_cut(Some(a), Some(b), mesh)).map(cut)
    }
}

/// Whether two digits next to each other are one cut.
fn one_cut(a: Option<&Digit>, b: Option<&Digit>, mesh: &Mesh) -> bool {
    match (a, b) {
        (Some(&Digit::Axis(a)), Some(&Digit::Axis(b))) => mesh.continues(a, b),
        _ => false,
    }
}

/// Whether these digits leave one index.
fn fixed(digits: &[Digit]) -> bool {
    digits.iter().all(|it| matches!(it, Digit::Axis(_)))
}

/// How many pieces a digit makes.
fn width(digit: Digit, mesh: &Mesh) -> u64 {
    u64::from(match digit {
        Digit::Axis(axis) => mesh.size(axis),
        Digit::Block(n) => n,
    })
}

fn product(digits: &[Digit], mesh: &Mesh) -> u64 {
    digits.iter().map(|&it| width(it, mesh)).product()
}

/// The position of the only size that is not 1, if there is just one.
fn only_one(sizes: impl Iterator<Item = u64>) -> Option<usize> {
    let mut others = sizes.enumerate().filter(|&(_, size)| size != 1);
    let (at, _) = others.next()?;
    others.next().is_none().then_some(at)
}

/// Drops empty runs and joins those that touch.
fn merged(runs: Runs) -> Runs {
    let mut res = Runs::new();
    for (start, len) in runs.into_iter().filter(|&(_, len)| len > 0) {
        match res.last_mut() {
            Some((last, n)) if *last + *n == start => *n += len,
            _ => res.push((start, len)),
        }
    }
    res
}

fn extent(cuts: &[Cut], size: u64, mesh: &Mesh, coord: &[u32]) -> u64 {
    let Some((cut, rest)) = cuts.split_first() else { return size };
    match cut.index(mesh, coord) {
        Some(index) => extent(rest, cut.piece(size, index).1, mesh, coord),
        None => {
            let (full, tail) = cut.pieces(size);
            full.1 * extent(rest, full.0, mesh, coord) + extent(rest, tail, mesh, coord)
        }
    }
}

/// The most that any choice of coordinates leaves of these ranges, given as (length, how many).
///
/// With blocks, coordinate 0 is not always the one that holds most: 7 rows as `[a.x3.b]` on
/// (a=2, b=2) leave 2 at (0, 0) and 3 at (1, 0). All ranges of one length are treated alike, so
/// only the coordinates where some length passes from full to short to empty need a look.
fn largest(cuts: &[Cut], ranges: &[(u64, u64)]) -> u64 {
    let Some((cut, rest)) = cuts.split_first() else {
        return ranges.iter().map(|&(len, n)| len * n).sum();
    };
    if let [Digit::Block(_)] = cut.digits {
        let mut next: SmallVec<[(u64, u64); 4]> = SmallVec::new();
        for &(len, n) in ranges {
            let (full, tail) = cut.pieces(len);
            next.push((full.0, full.1 * n));
            next.push((tail, n));
        }
        return largest(rest, &collected(next));
    }
    let mut candidates: SmallVec<[u64; 8]> = SmallVec::from_slice(&[0]);
    for &(len, _) in ranges {
        let full = cut.pieces(len).0.1;
        candidates.extend([full, full + 1].into_iter().filter(|&it| it < cut.width));
    }
    candidates.sort_unstable();
    candidates.dedup();
    let at = |index| collected(ranges.iter().map(|&(len, n)| (cut.piece(len, index).1, n)));
    candidates.into_iter().map(|it| largest(rest, &at(it))).max().unwrap_or(0)
}

/// Adds up the numbers of ranges of equal length, without empty ones.
fn collected(ranges: impl IntoIterator<Item = (u64, u64)>) -> SmallVec<[(u64, u64); 4]> {
    let mut res: SmallVec<[(u64, u64); 4]> =
        ranges.into_iter().filter(|&(len, n)| len > 0 && n > 0).collect();
    res.sort_unstable();
    res.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        if same {
            kept.1 += next.1;
        }
        same
    });
    res
}
