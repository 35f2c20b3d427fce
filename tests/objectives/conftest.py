from blank_pages import blank_pages, pages

__all__ = ["blank_pages", "pages"]
