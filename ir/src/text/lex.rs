//! [`Cursor`]: reads words, names, numbers and bracketed text from a byte position.
//!
//! There is no list of tokens: what may come next depends on where the parser is (`[` belongs to a
//! name in `%x[0]` and opens a shape in `f32[2]`), so the parser asks for what it expects and gets it
//! or an error that says so. Spaces and comments (`;` to the end of the line) are skipped in front of
//! everything; a line break ends a statement.

use std::borrow::Cow;
use std::ops::Range;
use std::str::FromStr;

use super::{ParseError, is_name_byte};

/// A position in a text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor<'a> {
    text: &'a str,
    pos: usize,
}

impl<'a> Cursor<'a> {
    /// The start of a text.
    pub fn new(text: &'a str) -> Cursor<'a> {
        Cursor { text, pos: 0 }
    }

    /// The byte after what was read last.
    pub fn pos(&self) -> usize {
        self.pos
    }

    /// The text from `start` to here.
    pub fn since(&self, start: usize) -> &'a str {
        &self.text[start..self.pos]
    }

    /// Where the next thing starts, after spaces and comments.
    fn next(&self) -> usize {
        let bytes = self.text.as_bytes();
        let mut pos = self.pos;
        loop {
            match bytes.get(pos) {
                Some(b' ' | b'\t' | b'\r') => pos += 1,
                Some(b';') => {
                    let rest = &bytes[pos..];
                    pos += rest.iter().position(|&it| it == b'\n').unwrap_or(rest.len());
                }
                _ => return pos,
            }
        }
    }

    /// Skips spaces and comments; says where the next thing starts.
    pub fn skip(&mut self) -> usize {
        self.pos = self.next();
        self.pos
    }

    /// Skips spaces, comments and line breaks.
    pub fn skip_lines(&mut self) -> usize {
        while self.eat(b'\n') {}
        self.skip()
    }

    /// The next byte that is no space, without reading it.
    pub fn byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.next()).copied()
    }

    /// The byte right here; spaces count.
    fn raw(&self) -> Option<u8> {
        self.text.as_bytes().get(self.pos).copied()
    }

    /// Reads `byte` if it comes next.
    pub fn eat(&mut self, byte: u8) -> bool {
        let next = self.next();
        let found = self.text.as_bytes().get(next) == Some(&byte);
        if found {
            self.pos = next + 1;
        }
        found
    }

    /// Reads `byte`, or fails.
    pub fn expect(&mut self, byte: u8) -> Result<(), ParseError> {
        match self.eat(byte) {
            true => Ok(()),
            false => Err(self.expected(&format!("`{}`", byte as char))),
        }
    }

    /// The next word, without reading it; empty if there is none.
    pub fn peek_word(&self) -> &'a str {
        let rest = &self.text[self.next()..];
        let word = |it: &u8| it.is_ascii_alphanumeric() || *it == b'_';
        &rest[..rest.as_bytes().iter().position(|it| !word(it)).unwrap_or(rest.len())]
    }

    /// A word: letters, digits and `_`.
    pub fn word(&mut self, what: &str) -> Result<&'a str, ParseError> {
        self.skip();
        match self.peek_word() {
            "" => Err(self.expected(what)),
            word => {
                self.pos += word.len();
                Ok(word)
            }
        }
    }

    /// Reads `word` if it comes next.
    pub fn eat_word(&mut self, word: &str) -> bool {
        let found = self.peek_word() == word;
        if found {
            self.pos = self.next() + word.len();
        }
        found
    }

    /// A whole number that fits.
    pub fn number<T: FromStr>(&mut self, what: &str) -> Result<T, ParseError> {
        let start = self.skip();
        let word = self.peek_word();
        if word.is_empty() || !word.bytes().all(|it| it.is_ascii_digit()) {
            return Err(self.expected(what));
        }
        self.pos += word.len();
        word.parse().map_err(|_| self.error(start..self.pos, format!("{word} is too large")))
    }

    /// `prefix` and a number, in one word: `s0`.
    pub fn handle(&mut self, prefix: char, what: &str) -> Result<u32, ParseError> {
        let start = self.skip();
        let word = self.peek_word();
        let digits = word.strip_prefix(prefix).unwrap_or_default();
        if digits.is_empty() || !digits.bytes().all(|it| it.is_ascii_digit()) {
            return Err(self.expected(&format!("{what} (`{prefix}0`)")));
        }
        self.pos += word.len();
        digits.parse().map_err(|_| self.error(start..self.pos, format!("{word} is too large")))
    }

    /// A name after its sigil: `%model.norm.weight`, `@llama`, `%"a name"`.
    pub fn sigil(&mut self, sigil: u8, what: &str) -> Result<Cow<'a, str>, ParseError> {
        if !self.eat(sigil) {
            return Err(self.expected(&format!("{what} (`{}name`)", sigil as char)));
        }
        self.name(what)
    }

    /// A name without a sigil.
    pub fn name(&mut self, what: &str) -> Result<Cow<'a, str>, ParseError> {
        if self.raw() == Some(b'"') {
            return self.string(what);
        }
        let rest = &self.text[self.pos..];
        let len = rest.bytes().position(|it| !is_name_byte(it)).unwrap_or(rest.len());
        if len == 0 {
            return Err(self.expected(what));
        }
        self.pos += len;
        Ok(Cow::Borrowed(&rest[..len]))
    }

    /// The name of a body, with its sigil: `@glu+amax`, `@glu+amax#2`.
    pub fn body_name(&mut self) -> Result<&'a str, ParseError> {
        let start = self.skip();
        let rest = &self.text.as_bytes()[start..];
        let ends = |it: &u8| !is_name_byte(*it) && !matches!(it, b'@' | b'+' | b'#');
        let len = rest.iter().position(ends).unwrap_or(rest.len());
        if len < 2 || rest[0] != b'@' {
            return Err(self.expected("a body (`@name`)"));
        }
        self.pos += len;
        Ok(self.since(start))
    }

    /// A string in double quotes.
    pub fn string(&mut self, what: &str) -> Result<Cow<'a, str>, ParseError> {
        let start = self.skip();
        let Some(len) = self.raw().filter(|&it| it == b'"').and_then(|_| self.string_len()) else {
            return Err(match self.raw() {
                Some(b'"') => self.unclosed(start, '"'),
                _ => self.expected(what),
            });
        };
        self.pos += len;
        let inner = &self.text[start + 1..self.pos - 1];
        if !inner.contains('\\') {
            return Ok(Cow::Borrowed(inner));
        }
        ron::from_str::<String>(self.since(start))
            .map(Cow::Owned)
            .map_err(|it| self.error(start..self.pos, format!("not a string: {}", it.code)))
    }

    /// Bytes of the string that starts here, quotes included; `None` if it does not end on its line.
    fn string_len(&self) -> Option<usize> {
        let bytes = &self.text.as_bytes()[self.pos..];
        let mut i = 1;
        loop {
            match bytes.get(i)? {
                b'"' => return Some(i + 1),
                b'\\' => i += 2,
                b'\n' => return None,
                _ => i += 1,
            }
        }
    }

    /// Text in brackets, on one line: `(transpose_b:true)`. Strings in it may hold anything.
    pub fn bracketed(&mut self) -> Result<&'a str, ParseError> {
        let start = self.skip();
        let mut depth = 0usize;
        loop {
            let Some(byte) = self.raw().filter(|&it| it != b'\n') else {
                return Err(self.unclosed(start, self.text.as_bytes()[start] as char));
            };
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                b'"' => match self.string_len() {
                    Some(len) => self.pos += len - 1,
                    None => return Err(self.unclosed(self.pos, '"')),
                },
                _ => (),
            }
            self.pos += 1;
            if depth == 0 {
                return Ok(self.since(start));
            }
        }
    }

    /// RON of one enum variant or struct: a word, perhaps followed by brackets.
    pub fn ron_text(&mut self, what: &str) -> Result<&'a str, ParseError> {
        let start = self.skip();
        if self.byte() != Some(b'(') {
            self.word(what)?;
        }
        if self.raw() == Some(b'(') {
            self.bracketed()?;
        }
        Ok(self.since(start))
    }

    /// The end of a statement.
    pub fn end_of_line(&mut self) -> Result<(), ParseError> {
        match self.byte() {
            Some(b'\n' | b'}') => Ok(()),
            // A statement may be the last thing of a truncated file: the caller notices.
            None => Ok(()),
            Some(_) => Err(self.expected("the end of the line")),
        }
    }

    /// The error that `what` does not come next.
    pub fn expected(&mut self, what: &str) -> ParseError {
        let start = self.skip();
        let Some(next) = self.text[start..].chars().next() else {
            let message = format!("unexpected end: expected {what}, the file is truncated");
            return self.error(start..start, message);
        };
        let word = self.peek_word();
        let (len, found) = match (next, word) {
            ('\n', _) => (1, "the end of the line".to_string()),
            (_, "") => (next.len_utf8(), format!("`{next}`")),
            (_, word) => (word.len(), format!("`{}`", word.get(..40).unwrap_or(word))),
        };
        self.error(start..start + len, format!("expected {what}, found {found}"))
    }

    fn unclosed(&self, start: usize, open: char) -> ParseError {
        match self.text[start..].contains('\n') {
            true => self.error(start..start + 1, format!("`{open}` is not closed on its line")),
            false => {
                let end = self.text.len();
                let message =
                    format!("unexpected end: `{open}` is not closed, the file is truncated");
                self.error(end..end, message)
            }
        }
    }

    /// An error at `span`.
    pub fn error(&self, span: Range<usize>, message: String) -> ParseError {
        let before = &self.text[..span.start];
        let line_start = before.rfind('\n').map_or(0, |it| it + 1);
        let line = before.bytes().filter(|&it| it == b'\n').count() as u32 + 1;
        let column = before[line_start..].chars().count() as u32 + 1;
        ParseError { span, line, column, message }
    }

    /// The error for a file that holds something else, at its first word.
    pub fn wrong_kind(mut self, wanted: &str, found: &str) -> ParseError {
        let start = self.skip_lines();
        let end = start + self.peek_word().len();
        self.error(start..end, format!("expected {wanted}, and this is {found}"))
    }
}
