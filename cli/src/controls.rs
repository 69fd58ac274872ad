//! Control characters: names come from files, and a terminal obeys some of what may be in them.
//!
//! [`shown`] is what stands between any text and stdout or stderr; [`clean`] keeps what must stay on its line.

use std::borrow::Cow;

/// Text out of a file, on one line, without what would move the cursor of a terminal.
pub fn clean(text: &str) -> String {
    let mut res = String::with_capacity(text.len());
    for it in text.chars() {
        match it.is_control() {
            true => res.extend(it.escape_default()),
            false => res.push(it),
        }
    }
    res
}

/// Text as it is printed: control characters are written out, as in `\u{1b}`, but for ends of lines, tabs, and
/// the colours of reports. Text may not be hidden, so that is none of them.
///
/// ```text
/// a\x1b[2Jb       ->  a\u{1b}[2Jb
/// \x1b[31mno\x1b[0m  ->  the same
/// ```
pub fn shown(text: &str) -> Cow<'_, str> {
    let harmless = |it: char| !it.is_control() || matches!(it, '\n' | '\t');
    if text.chars().all(harmless) {
        return Cow::Borrowed(text);
    }
    let mut res = String::with_capacity(text.len() + 16);
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let taken = match first {
            '\r' if rest.starts_with("\r\n") => 2,
            '\x1b' => color(rest),
            _ => 0,
        };
        res.push_str(&rest[..taken]);
        if taken == 0 && harmless(first) {
            res.push(first);
        } else if taken == 0 {
            res.extend(first.escape_default());
        }
        rest = &rest[taken.max(first.len_utf8())..];
    }
    Cow::Owned(res)
}

/// The length of the change of colour that text starts with; 0 if it starts with none, or conceals (8).
fn color(text: &str) -> usize {
    let Some((parameters, _)) = text.strip_prefix("\x1b[").and_then(|it| it.split_once('m')) else {
        return 0;
    };
    let number = |it: &str| it.len() <= 3 && it.bytes().all(|it| it.is_ascii_digit());
    let all = parameters.split(';').all(|it| number(it) && it.trim_start_matches('0') != "8");
    if all { "\x1b[m".len() + parameters.len() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_is_written_out() {
        let check = |text: &str, expect: &str| assert_eq!(shown(text), expect);
        check("a\tb\nü\r\n", "a\tb\nü\r\n");
        check("a\x1b[2Jb\rc\x07", "a\\u{1b}[2Jb\\rc\\u{7}");
        check("\x1b]0;title\x07", "\\u{1b}]0;title\\u{7}");
        check("\u{9b}31m\x7f", "\\u{9b}31m\\u{7f}");
        check("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m");
        check("\x1b[1;4;38;5;16;48;5;153m0\x1b[0m", "\x1b[1;4;38;5;16;48;5;153m0\x1b[0m");
        check("\x1b[8mhidden\x1b[1;08m", "\\u{1b}[8mhidden\\u{1b}[1;08m");
        check("\x1b", "\\u{1b}");
        assert_eq!(clean("a\nb\x1b[0m"), "a\\nb\\u{1b}[0m");
    }
}
