//! [`Excerpt`]: the lines around an error, as `miette` draws them. Long lines are cut.
//!
//! `miette` prints lines whole and sets columns with widths of Rust's formatter, which panics beyond 65,535.
//!
//! ```text
//! [RmsNorm(), .. 65,000 characters .. RmsNorm() Rms  ->  ...RmsNorm(),RmsNorm() Rms...
//! ```

use std::ops::Range;

use miette::{MietteError, MietteSpanContents, SourceCode, SourceSpan, SpanContents};

use super::position;

/// Characters of a line that are shown.
const MAX_LINE: usize = 200;
/// Characters that a line that is cut shows before the error.
const LEAD: usize = 60;
/// Stands where text was left out.
const CUT: &str = "...";

/// The lines that an error is on, and one before and one behind.
#[derive(Debug)]
pub(super) struct Excerpt {
    file: String,
    text: String,
    /// The bytes of `text` at fault.
    span: Range<usize>,
    /// Number of the first line in the file, from 0.
    first_line: usize,
    /// Line and column of the error in the file, from 0.
    at: (usize, usize),
}

impl Excerpt {
    /// The lines of `source` around some of its bytes.
    pub fn of(file: String, source: &str, bytes: &Range<usize>) -> Excerpt {
        let start = source.floor_char_boundary(bytes.start);
        let end = source.ceil_char_boundary(bytes.end).max(start);
        let (line, column) = position(source, start).unwrap_or((1, 1));
        let at = (line - 1, column - 1);
        let line_start = |byte: usize| source[..byte].rfind('\n').map_or(0, |it| it + 1);
        let own = line_start(start);
        let first = line_start(own.saturating_sub(1));
        let first_line = if first < own { at.0 - 1 } else { at.0 };
        let mut res = Excerpt { file, text: String::new(), span: 0..0, first_line, at };
        let last_byte = source.floor_char_boundary(end.saturating_sub(1)).max(start);
        let mut from = first;
        for line in source[first..].split_inclusive('\n') {
            res.push(line, from, &(start..end));
            if from > last_byte {
                break;
            }
            from += line.len();
        }
        res
    }

    /// Adds a line, which starts at byte `from` of the source, and the part of the span in it.
    fn push(&mut self, line: &str, from: usize, span: &Range<usize>) {
        let content = line.trim_end_matches(['\n', '\r']);
        let inside = |byte: usize| (from..=from + line.len()).contains(&byte).then(|| byte - from);
        let window = window(content, inside(span.start).filter(|&it| it <= content.len()));
        let dots = |cut: bool| if cut { CUT } else { "" };
        self.text.push_str(dots(window.start > 0));
        let shown = self.text.len();
        let is_whole = window == (0..content.len());
        let place = |byte: usize| match is_whole {
            true => shown + byte,
            false => shown + byte.clamp(window.start, window.end) - window.start,
        };
        if from <= span.start {
            self.span.start = place(inside(span.start).unwrap_or(line.len()));
        }
        if from <= span.end {
            self.span.end = place(inside(span.end).unwrap_or(line.len()));
        }
        self.text.push_str(&content[window.clone()]);
        self.text.push_str(dots(window.end < content.len()));
        self.text.push_str(&line[content.len()..]);
    }

    /// The bytes at fault of the text that is shown.
    pub fn span(&self) -> SourceSpan {
        (self.span.start, self.span.len()).into()
    }
}

/// The bytes of a line that are shown, where the error begins at byte `focus` if it is on this line.
fn window(line: &str, focus: Option<usize>) -> Range<usize> {
    if line.chars().nth(MAX_LINE).is_none() {
        return 0..line.len();
    }
    let focus = focus.unwrap_or(0);
    let start = line[..focus].char_indices().rev().nth(LEAD - 1).map_or(0, |it| it.0);
    let end = line[start..].char_indices().nth(MAX_LINE).map_or(line.len(), |it| start + it.0);
    start..end
}

impl SourceCode for Excerpt {
    /// `miette` asks with lines around the span for what it draws, and without any for where that is.
    fn read_span<'a>(
        &'a self,
        _: &SourceSpan,
        context_lines_before: usize,
        _: usize,
    ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
        let ((line, column), bytes) = match context_lines_before {
            0 => (self.at, self.span.clone()),
            _ => ((self.first_line, 0), 0..self.text.len()),
        };
        let data = &self.text.as_bytes()[bytes.clone()];
        let span = (bytes.start, bytes.len()).into();
        let n_lines = self.text.lines().count();
        let file = self.file.clone();
        Ok(Box::new(MietteSpanContents::new_named(file, data, span, line, column, n_lines)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, bytes: Range<usize>, text: &str, at_fault: &str) -> Excerpt {
        let res = Excerpt::of("f".into(), source, &bytes);
        assert_eq!((res.text.as_str(), &res.text[res.span.clone()]), (text, at_fault));
        res
    }

    #[test]
    fn lines_around_an_error() {
        let source = "a\nbc\nde\nfg\nh\n";
        assert_eq!(check(source, 6..7, "bc\nde\nfg\n", "e").first_line, 1);
        assert_eq!(check(source, 0..1, "a\nbc\n", "a").first_line, 0);
        assert_eq!(check(source, 5..9, "bc\nde\nfg\nh\n", "de\nf").at, (2, 0));
        check(source, 12..12, "fg\nh\n", "");
        check("", 0..0, "", "");
        check("ä", 1..1, "ä", "ä");
    }

    #[test]
    fn long_lines_are_cut_around_the_error() {
        let (x, y) = ("x".repeat(70_000), "ä".repeat(300));
        let source = format!("{y}\n{x}!{x}\n{y}");
        let bytes = 70_601..70_602;
        let res = Excerpt::of("f".into(), &source, &bytes);
        let lines: Vec<&str> = res.text.lines().collect();
        assert_eq!(lines[0], format!("{}...", &y[..2 * MAX_LINE]));
        assert_eq!(lines[1], format!("...{}!{}...", &x[..LEAD], &x[..MAX_LINE - LEAD - 1]));
        assert_eq!((&res.text[res.span.clone()], res.at), ("!", (1, 70_000)));
        let res = Excerpt::of("f".into(), &source, &(0..source.len()));
        assert_eq!(res.text.lines().count(), 3);
        let end = Excerpt::of("f".into(), &source, &(source.len()..source.len()));
        assert_eq!(end.span, end.text.len()..end.text.len());
    }
}
