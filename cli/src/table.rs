//! How numbers and columns are printed: aligned, short, and inside 80 characters.

/// The width that everything fits.
pub const WIDTH: usize = 80;

/// `1.6 MiB`, three digits at least; `512 B`.
pub fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    scaled(n, 1024.0, &units)
}

/// `8.03 G`, three digits at least; `512`.
pub fn short(n: u64) -> String {
    scaled(n, 1000.0, &["", "k", "M", "G", "T", "P", "E"]).trim_end().to_string()
}

/// `61.4 %`, of a share of 1.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// `1.24 ms`, three digits; `0 s`.
pub fn seconds(it: f64) -> String {
    let (value, unit) = match it {
        _ if it <= 0.0 => return "0 s".to_string(),
        ..0.999_5e-6 => (it * 1e9, "ns"),
        ..0.999_5e-3 => (it * 1e6, "µs"),
        ..0.999_5 => (it * 1e3, "ms"),
        _ => (it, "s"),
    };
    let decimals = match value {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

/// `27,483`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut res = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            res.push(',');
        }
        res.push(digit);
    }
    res
}

/// `1 weight`, `2 weights`.
pub fn plural(n: u64, what: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{} {what}{s}", grouped(n))
}

fn scaled(n: u64, base: f64, units: &[&str]) -> String {
    let mut value = n as f64;
    let mut unit = 0;
    // What would round up to the base goes to the next unit.
    while value >= base - 0.5 && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 => 0,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {}", units[unit])
}

/// Cuts the middle out of a name that is longer than `width`.
pub fn elided(name: &str, width: usize) -> String {
    let n = name.chars().count();
    if n <= width {
        return name.to_string();
    }
    let head = width.saturating_sub(2) / 3;
    let tail = width.saturating_sub(2) - head;
    let start: String = name.chars().take(head).collect();
    let end: String = name.chars().skip(n - tail).collect();
    format!("{start}..{end}")
}

/// Which side of a column its cells keep to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows of cells; columns are as wide as their widest cell.
#[derive(Debug, Clone)]
pub struct Table {
    indent: usize,
    aligns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with a column for each of `aligns`.
    pub fn new(indent: usize, aligns: &[Align]) -> Table {
        Table { indent, aligns: aligns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        debug_assert_eq!(cells.len(), self.aligns.len());
        self.rows.push(cells);
    }

    /// All rows, each with a line break.
    pub fn text(&self) -> String {
        let width = |column: usize| {
            self.rows.iter().map(|it| it[column].chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.aligns.len()).map(width).collect();
        let mut res = String::new();
        for row in &self.rows {
            let mut line = " ".repeat(self.indent);
            for ((cell, align), width) in row.iter().zip(&self.aligns).zip(&widths) {
                // `format!` takes widths up to 65535, and keys may be longer.
                let padding = " ".repeat(width - cell.chars().count());
                let cell = match align {
                    Align::Left => [cell, padding.as_str()],
                    Align::Right => [padding.as_str(), cell],
                };
                line.extend(cell);
                line.push_str("  ");
            }
            res.push_str(line.trim_end());
            res.push('\n');
        }
        res
    }
}

/// Breaks `text` into lines of at most `width`, at spaces.
pub fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut res: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match res.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => res.push(word.to_string()),
        }
    }
    res
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(found: String, expect: &str) {
        assert_eq!(found, expect);
    }

    #[test]
    fn numbers_are_short() {
        check(bytes(0), "0 B");
        check(bytes(1023), "1023 B");
        check(bytes(1024), "1.00 KiB");
        check(bytes(1_690_000), "1.61 MiB");
        check(bytes(12 << 30), "12.0 GiB");
        check(bytes(1024 * 1024 - 1), "1.00 MiB");
        check(seconds(0.0), "0 s");
        check(seconds(4.2e-6), "4.20 µs");
        check(seconds(0.999_9e-3), "1.00 ms");
        check(seconds(0.8), "800 ms");
        check(seconds(12.34), "12.3 s");
        check(short(12), "12");
        check(short(8_030_261_248), "8.03 G");
        check(short(999_600), "1.00 M");
        check(grouped(27_483), "27,483");
        check(grouped(123), "123");
        check(plural(1, "rank"), "1 rank");
        check(plural(1024, "rank"), "1,024 ranks");
    }

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(2, &[Align::Left, Align::Right]);
        table.row(["dp".to_string(), "12".to_string()]);
        table.row(["dp, tp".to_string(), "3".to_string()]);
        check(table.text(), "  dp      12\n  dp, tp   3\n");
        table.row(["k".repeat(1 << 16), "1".to_string()]);
        assert_eq!(table.text().lines().map(str::len).max(), Some(2 + (1 << 16) + 2 + 2));
    }

    #[test]
    fn long_text_fits() {
        check(elided("model.layers.0.self_attn.q_proj.weight", 20), "model..._proj.weight");
        assert_eq!(wrapped("a bc def", 4), ["a bc", "def"]);
    }
}
