//! Half-open runs of elements.

use std::fmt;

/// A half-open run of elements: `start` is in it, `end` is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Span {
    /// The first element.
    pub start: usize,
    /// The element after the last.
    pub end: usize,
}

impl Span {
    /// The elements from `start` up to, not including, `end`; empty where `end` is not above `start`.
    pub const fn new(start: usize, end: usize) -> Self {
        Self {
            start,
            end: if end < start { start } else { end },
        }
    }

    /// `len` elements from `start`.
    pub const fn of_len(start: usize, len: usize) -> Self {
        Self {
            start,
            end: start + len,
        }
    }

    /// How many elements.
    pub const fn len(self) -> usize {
        self.end - self.start
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.end <= self.start
    }

    /// The elements that are in both; `None` where there is none.
    pub fn intersect(self, other: Self) -> Option<Self> {
        let common = Self {
            start: self.start.max(other.start),
            end: self.end.min(other.end),
        };
        (common.start < common.end).then_some(common)
    }

    /// The same run, `by` elements further.
    #[must_use]
    pub const fn shift(self, by: usize) -> Self {
        Self {
            start: self.start + by,
            end: self.end + by,
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_half_open() {
        let span = Span::of_len(3, 4);
        assert_eq!(span, Span::new(3, 7));
        assert_eq!(span.len(), 4);
        assert_eq!(span.to_string(), "[3, 7)");
        assert!(!span.is_empty() && Span::new(3, 3).is_empty() && Span::new(3, 1).is_empty());
        assert_eq!(span.shift(2), Span::new(5, 9));
    }

    #[test]
    fn intersections_are_never_empty() {
        let span = Span::new(3, 7);
        assert_eq!(span.intersect(Span::new(5, 9)), Some(Span::new(5, 7)));
        assert_eq!(span.intersect(Span::new(0, 9)), Some(span));
        assert_eq!(span.intersect(Span::new(7, 9)), None);
        assert_eq!(span.intersect(Span::new(0, 3)), None);
        assert_eq!(span.intersect(Span::new(5, 5)), None);
    }
}
